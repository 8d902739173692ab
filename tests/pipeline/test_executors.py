"""Both executors of a pipeline behave alike, and as the model without stages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import export_consensus, load_consensus
from support.layered import assert_close, language_model, tokens

ONE_F_ONE_B = js.schedules.one_f_one_b(2, 2)
MODEL, PARAMS = language_model(2)


def pipeline(executor: str, model: Any = MODEL, params: Any = PARAMS, **options: Any) -> Any:
    mesh = js.make_mesh(options.pop("axes", {"replica": 2, "stage": 2}))
    schedule = options.pop("schedule", ONE_F_ONE_B)
    return js.pipelined(model, params, schedule, mesh=mesh, executor=executor, **options)


def step_of(loss_fn: Any, optimizer: Any = None, **options: Any) -> Any:
    if "gradients" not in options:
        base = js.local_sgd("replica", sync_every=2)
        options.setdefault("sync", js.slowmo("replica", base=base, sync_every=4))
    mesh = loss_fn.mesh if loss_fn is not MODEL else js.virtual_mesh({"replica": 2})
    return js.make_train_step(loss_fn, optimizer or optax.adam(0.02), mesh=mesh, **options)


def trained(step: Any) -> Any:
    """Return the state after three steps, and the last metrics."""
    state, metrics = step.init(PARAMS), None
    for t in range(3):
        batch = {**tokens(16, seed=t), "update": np.float32(t)}  # a number of all examples
        state, metrics = step(state, batch)
    return state, metrics


@functools.cache
def step_with_slowmo(executor: str) -> Any:
    """Return the step that several tests share; "" is that without stages."""
    return step_of(pipeline(executor) if executor else MODEL)


@pytest.fixture(params=["one_program", "host"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_bad_value_of_one_replica_is_left_out() -> None:
    optimizer = js.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), initial=1.0)
    gradients = js.all_reduce_gradients("replica")
    step = step_of(pipeline("one_program"), optimizer, gradients=gradients, donate=False)
    state = step.init(PARAMS)
    broken = jax.tree.map(lambda x: x.at[1, -1, 0].set(jnp.nan), state.params)
    after, metrics = step(state._replace(params=broken), tokens(16))
    assert np.isfinite(metrics["loss"]).tolist() == [True, False]
    np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])
    jax.tree.map(np.testing.assert_array_equal, after.params, broken)


def dropped(params: Any, x: jax.Array, *, key: Any = None) -> jax.Array:
    y = jnp.tanh(x @ params)
    return y if key is None else y * jax.random.bernoulli(key, 0.5, y.shape).astype(y.dtype) * 2


def test_keys_are_those_of_the_microbatches(executor: str) -> None:
    """Test four stages: of these the second and the third share a branch."""
    draw = np.random.default_rng(0).normal
    params, batch = list(np.float32(draw(size=(4, 4, 4)))), np.float32(draw(size=(4, 4)))
    model = js.LayeredModel([dropped] * 4, lambda y, x: jnp.mean((y - x) ** 2))
    options = {"axes": {"stage": 4}, "schedule": js.schedules.one_f_one_b(4, 2)}
    pipe, rng = pipeline(executor, model, params, **options), jax.random.key(3)
    jit: Any = jax.jit if executor == "one_program" else lambda fn: fn
    found = jit(jax.value_and_grad(pipe))(params, batch, rng=rng)

    def by_hand(params: Any) -> Any:
        first = model(params, batch[:2], rng=jax.random.fold_in(rng, 0))
        return (first + model(params, batch[2:], rng=jax.random.fold_in(rng, 1))) / 2

    assert_close(found, jax.jit(jax.value_and_grad(by_hand))(params))
    # The words of a key without a type are one, too.
    assert_close(jit(pipe)(params, batch, rng=jax.random.key_data(rng)), found[0])


def test_microbatches_may_wait_on_the_host_and_backward_passes_be_split() -> None:
    """Test the host alone: `one_program/` has these for one program and each schedule."""
    options = {"schedule": js.schedules.zero_bubble(2, 4), "axes": {"stage": 2}, "remat": True}
    pipe = pipeline("host", batch_memory="host", **options)
    batch, stacked = tokens(8), pipe.layout.stack(PARAMS)
    value, grads = jax.value_and_grad(pipe, has_aux=True)(stacked, batch)
    expected = jax.value_and_grad(MODEL, has_aux=True)(PARAMS, batch)
    assert_close((value, pipe.layout.unstack(grads)), expected)
    assert_close(pipe(PARAMS, batch), expected[0])


def test_an_export_is_of_the_models_own_tree(tmp_path: Any) -> None:
    step = step_with_slowmo("host")
    state, _ = trained(step)
    export_consensus(tmp_path / "model", state.params, mesh=step.mesh)
    exported = load_consensus(tmp_path / "model", like=PARAMS)
    assert jax.tree.structure(exported) == jax.tree.structure(PARAMS)
    assert_close(exported, step.consensus(state), 0)
    assert_close(js.consensus(state.params, mesh=step.mesh), step.consensus(state), 0)
    buffers = step.consensus(state, whole=False)
    assert_close(pipeline("host")(buffers, tokens(8)), MODEL(exported, tokens(8)))


def test_a_step_leaves_no_further_arrays_alive(executor: str) -> None:
    step = step_with_slowmo(executor)
    state, counts = step.init(PARAMS), []
    # The losses of the last steps are held, up to eight, of which four go at once.
    for t in range(40):
        state, metrics = step(state, tokens(16, seed=t))
        del metrics
        counts.append(len(jax.live_arrays()))
    jax.block_until_ready(state)
    assert counts[-4:] == counts[-8:-4]


def test_steps_of_layers_with_keys_and_state_are_compiled_without_running() -> None:
    """A layer that runs would count; batches are arrays, and then types."""
    ran = []

    def drawn(params: Any, x: Any, *, key: Any, state: Any) -> Any:
        jax.debug.callback(lambda: ran.append(1))
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return x * params["w"] + noise, {"seen": state["seen"] + 1}

    model = js.LayeredModel([drawn, drawn], lambda out, batch: jnp.mean(out**2))
    params, states = [{"w": np.float32(1)}] * 2, [{"seen": np.float32(0)}] * 2
    pipe = pipeline("host", model, params, model_state=states)
    step = step_of(pipe, optax.sgd(0.1), accumulate=2)
    state, batch = step.init(params, model_state=states), np.ones((8, 2), np.float32)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for one in (batch, types):
        assert step.compiled(state, one).as_text()
    js.comm_report(step, state, batch)
    jax.effects_barrier()
    assert not ran
    new, _ = step(state, batch)
    seen = pipe.state_layout.unstack(jax.tree.map(lambda x: np.asarray(x)[0], new.model_state))
    assert [float(of_layer["seen"]) for of_layer in seen] == [4, 4]  # two times two microbatches
