"""Both executors of a pipeline behave alike, and as the model without stages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints, export_consensus, load_consensus
from support.layered import assert_close, language_model, tokens

ONE_F_ONE_B = js.schedules.one_f_one_b(2, 2)
MODEL, PARAMS = language_model(2)
EXECUTORS = ["one_program", "host"]


def slowmo() -> Any:
    return js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)


def pipeline(executor: str, model: Any = MODEL, params: Any = PARAMS, **options: Any) -> Any:
    mesh = js.make_mesh(options.pop("axes", {"replica": 2, "stage": 2}))
    schedule = options.pop("schedule", ONE_F_ONE_B)
    return js.pipelined(model, params, schedule, mesh=mesh, executor=executor, **options)


def step_of(loss_fn: Any, optimizer: Any = None, **options: Any) -> Any:
    if "gradients" not in options:
        options.setdefault("sync", slowmo())
    mesh = loss_fn.mesh if loss_fn is not MODEL else js.virtual_mesh({"replica": 2})
    return js.make_train_step(loss_fn, optimizer or optax.adam(0.02), mesh=mesh, **options)


def trained(step: Any, params: Any = PARAMS, steps: int = 5) -> Any:
    """Return the state after some steps, and the metrics of each."""
    state, losses = step.init(params), []
    for t in range(steps):
        batch = {**tokens(16, seed=t), "update": np.float32(t)}  # a number of all examples
        state, metrics = step(state, batch)
        losses.append(jax.tree.map(np.asarray, metrics))
    return state, losses


@functools.cache
def step_with_slowmo(executor: str) -> Any:
    """Return the step that several tests share; "" is that without stages."""
    return step_of(pipeline(executor) if executor else MODEL)


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


def test_windows_of_batches_become_one_update(executor: str) -> None:
    def updated(step: Any) -> Any:
        """Return what a step gives for two windows of batches, and the consensus behind them."""
        state = step.init(PARAMS)
        window, first = step.collect(state, tokens(16, seed=1))
        window, _ = step.collect(state, tokens(16, seed=2), window=window)
        state, second = step(state, tokens(16, seed=3), window=window)
        window, _ = step.collect(state, tokens(16, seed=4))
        state, third = step.apply(state, window)
        return first, second, third, step.evaluate(state, tokens(16)), step.consensus(state)

    assert_close(updated(step_with_slowmo(executor)), updated(step_with_slowmo("")))


BY_LOSS = optax.GradientTransformationExtraArgs(
    lambda params: (),
    lambda grads, state, params, *, value, **_: (
        jax.tree.map(lambda g: -0.1 * value * g, grads),
        state,
    ),
)
POLICY = js.gradients.Policy("bfloat16", keep=("tokens",))
BESIDE = {
    "the loss is told": (BY_LOSS, {"sync": "none"}, 1e-5),
    "gossip in 16 bits": (optax.sgd(0.1), {"sync": js.sgp("replica"), "policy": POLICY}, 0.03),
}


@pytest.mark.parametrize(
    ("name", "executor"), [("the loss is told", "one_program"), ("gossip in 16 bits", "host")]
)
def test_what_stands_beside_acts_as_without_stages(name: str, executor: str) -> None:
    optimizer, options, tolerance = BESIDE[name]
    results = []
    for loss_fn in (pipeline(executor), MODEL):
        step = step_of(loss_fn, optimizer, **options)
        state, metrics = trained(step, steps=3)
        results.append((metrics, step.consensus(state)))
    assert_close(*results, tolerance)


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


def noisy(layers: int) -> js.LayeredModel:
    return js.LayeredModel([dropped] * layers, lambda y, x: jnp.mean((y - x) ** 2))


MATRICES = [np.random.default_rng(i).normal(size=(4, 4)).astype(np.float32) for i in range(4)]


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def test_keys_are_those_of_the_microbatches(executor: str) -> None:
    """Test four stages: of these the second and the third share a branch."""
    options = {"axes": {"stage": 4}, "schedule": js.schedules.one_f_one_b(4, 2)}
    pipe = pipeline(executor, noisy(4), MATRICES, **options)
    rng, batch = jax.random.key(3), rows(4)
    jit: Any = jax.jit if executor == "one_program" else lambda fn: fn
    found = jit(jax.value_and_grad(pipe))(MATRICES, batch, rng=rng)

    def by_hand(params: Any) -> Any:
        each = [
            noisy(4)(params, batch[2 * i : 2 * i + 2], rng=jax.random.fold_in(rng, i))
            for i in range(2)
        ]
        return sum(each) / 2

    assert_close(found, jax.jit(jax.value_and_grad(by_hand))(MATRICES))
    # The words of a key without a type are one, too.
    assert_close(jit(pipe)(MATRICES, batch, rng=jax.random.key_data(rng)), found[0])


def test_microbatches_may_wait_on_the_host_and_backward_passes_be_split() -> None:
    """Test the host alone: `one_program/` has these for one program and each schedule."""
    options = {"schedule": js.schedules.zero_bubble(2, 4), "axes": {"stage": 2}, "remat": True}
    pipe = pipeline("host", batch_memory="host", **options)
    batch, stacked = tokens(8), pipe.layout.stack(PARAMS)
    value, grads = jax.value_and_grad(pipe, has_aux=True)(stacked, batch)
    expected = jax.value_and_grad(MODEL, has_aux=True)(PARAMS, batch)
    assert_close((value, pipe.layout.unstack(grads)), expected)
    assert_close(pipe(PARAMS, batch), expected[0])


def test_checkpoints_resume_with_either_executor_and_without_stages(tmp_path: Any) -> None:
    step, batch, results = step_with_slowmo("host"), tokens(16, seed=9), []
    state, _ = trained(step, steps=3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, wait=True)
        for other in (step_with_slowmo(one) for one in ("host", "one_program", "")):
            restored = checkpoints.restore(other, PARAMS)
            assert restored.is_exact
            after, metrics = other(restored.state, batch)
            results.append((metrics, other.consensus(after)))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_an_export_is_of_the_models_own_tree(tmp_path: Any) -> None:
    step = step_with_slowmo("host")
    state, _ = trained(step, steps=1)
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


def test_the_report_counts_what_each_kind_of_step_sends(executor: str) -> None:
    step = step_with_slowmo(executor)
    report = js.comm_report(step, step.init(PARAMS), tokens(16))
    assert report.count(axis="replica", kind="local") == 0
    assert report.count(axis="replica", kind="slow", collective="reduce-scatter") == 1
    assert report.count(axis="replica", kind="slow", collective="all-gather") == 1


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
    step = step_of(pipe, optax.sgd(0.1))
    state, batch = step.init(params, model_state=states), np.ones((8, 2), np.float32)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for one in (batch, types):
        assert step.compiled(state, one).as_text()
    js.comm_report(step, state, batch)
    jax.effects_barrier()
    assert not ran
    new, _ = step(state, batch)
    seen = pipe.state_layout.unstack(jax.tree.map(lambda x: np.asarray(x)[0], new.model_state))
    assert [float(of_layer["seen"]) for of_layer in seen] == [2, 2]  # microbatches
