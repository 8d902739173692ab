"""Stages with programs of their own: what passes between them, how long, and where it lies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline._host_pipeline import Pass
from support.layered import assert_close, language_model, tokens


def dispatched(model: Any, params: Any, schedule: Any, axes: dict[str, int], **options: Any) -> Any:
    mesh = js.make_mesh(axes)
    return js.pipelined(model, params, schedule, mesh=mesh, executor="host", **options)


def test_a_stash_is_let_go_when_its_microbatch_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = language_model(0, tied=False)
    schedule = js.schedules.one_f_one_b(2, 8)
    pipe = dispatched(model, params, schedule, {"stage": 2})
    most, dispatch = 0, Pass._dispatch

    def watched(self: Pass, operation: Any) -> Any:
        nonlocal most
        made = dispatch(self, operation)
        most = max(most, sum(stage == 0 for stage, _ in self._stash))
        return made

    monkeypatch.setattr(Pass, "_dispatch", watched)
    jax.grad(pipe, has_aux=True)(params, tokens(8))
    assert most == 2 == schedule.stash[0]


def test_half_precision_is_summed_in_float32() -> None:
    model = js.LayeredModel(
        [lambda p, batch: p["w"] * batch["x"], lambda p, x: x], lambda x, batch: jnp.mean(x)
    )
    params = [{"w": jnp.ones((), jnp.bfloat16)}, {}]
    pipe = dispatched(model, params, js.schedules.gpipe(2, 8), {"stage": 2})
    # In bfloat16 each of the small ones would be lost beside 1.
    x = jnp.array([1.0] + [2.0**-9] * 7, jnp.bfloat16)
    grads = jax.grad(pipe)(params, {"x": x})
    assert grads[0]["w"].dtype == jnp.bfloat16
    assert float(grads[0]["w"]) == (1 + 2**-6) / 8


class Passed(NamedTuple):
    """What the stages of the next test send each other: other things at every hop."""

    value: dict[str, jax.Array]
    mask: jax.Array
    step: jax.Array


def masked(p: Any, batch: Any) -> Passed:
    return Passed({"a": batch["x"] @ p["w"]}, batch["mask"], jnp.int32(1))


def doubled(p: Any, x: Passed) -> Passed:
    a = x.value["a"] * p["s"][None] * x.mask[:, None].astype(jnp.float32)
    return Passed({"a": a, "b": jnp.sin(x.value["a"])}, x.mask, x.step + 1)


def summed(p: Any, x: Passed) -> jax.Array:
    return (x.value["a"] + x.value["b"]) @ p["w"] * x.step.astype(jnp.float32)


def test_stages_may_pass_on_anything_on_explicit_meshes_too() -> None:
    model = js.LayeredModel(
        [masked, doubled, summed],
        lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
    )
    draw = np.random.default_rng(0).normal
    params = [{"w": draw(size=(3, 4))}, {"s": np.ones(4)}, {"w": draw(size=(4, 2))}]
    params = jax.tree.map(np.float32, params)
    batch = {"x": np.float32(draw(size=(16, 3))), "mask": np.arange(16) % 3 > 0}
    batch["y"] = np.float32(draw(size=(16, 2)))
    mesh = jax.make_mesh((2, 3), ("replica", "stage"), devices=jax.devices()[:6])
    schedule = js.schedules.zero_bubble(3, 4)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor="host")
    with pytest.raises(ValueError, match=r"stage 0 gives .* stage 1 .*`executor`=\"host\""):
        jax.jit(js.pipelined(model, params, schedule, mesh=mesh))(params, batch)

    sync = js.local_sgd("replica", sync_every=1)
    results = []
    for loss_fn, on in ((pipe, mesh), (model, js.virtual_mesh({"replica": 2}))):
        step = js.make_train_step(loss_fn, optax.adam(0.1), sync=sync, mesh=on)
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, batch)
        results.append((metrics, step.consensus(state)))
    assert_close(*results, 1e-4)


def test_weights_stay_sharded_over_axes_that_are_the_compilers() -> None:
    sharded = {"up": P(None, "tensor"), "bias": P("tensor"), "down": P("tensor")}
    specs = [{"table": P()}, *[sharded] * 2, {"table": P(None, "tensor")}]
    model, params = language_model(2, tied=False)
    axes = {"replica": 2, "stage": 2, "tensor": 2}
    pipe = dispatched(model, params, js.schedules.zero_bubble(2, 2), axes, param_specs=specs)
    sync = js.local_sgd("replica", sync_every=1)
    step = js.make_train_step(pipe, optax.adam(0.1), sync=sync, mesh=pipe.mesh)
    state = step.init(params)
    lies = jax.tree.map(lambda x: x.sharding, state.params)
    for t in range(2):
        state, _ = step(state, tokens(8, seed=t))
    for name, x in state.params.items():
        assert x.sharding.is_equivalent_to(lies[name], x.ndim)
    (shard, *_) = state.params["float32/tensor"].addressable_shards
    assert shard.data.shape[:3] == (1, 1, 1)


def test_a_stage_has_as_many_programs_as_kinds_of_operations() -> None:
    """However many microbatches there are, and whatever batches come after."""
    model, params = language_model(2)
    pipe = dispatched(model, params, js.schedules.zero_bubble(2, 8), {"stage": 2})
    for seed in range(3):
        jax.grad(pipe, has_aux=True)(params, tokens(16, seed))
    (execution,) = pipe._executions.values()
    for programs in execution._programs:
        for name in ("weights", "forward", "backward_input", "backward_weight", "backward"):
            assert getattr(programs, name)._cache_size() <= 1
