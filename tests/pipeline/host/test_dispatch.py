"""Stages with programs of their own: what passes between them, how long, and where it lies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.layered import assert_close


def dispatched(model: Any, params: Any, schedule: Any, axes: dict[str, int], **options: Any) -> Any:
    mesh = js.make_mesh(axes)
    return js.pipelined(model, params, schedule, mesh=mesh, executor="host", **options)


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


def test_stages_may_pass_on_anything_on_explicit_meshes_too() -> None:
    """What stages send each other is another thing at every hop."""

    def masked(p: Any, batch: Any) -> Any:
        return {"a": batch["x"] @ p["w"]}, batch["mask"], jnp.int32(1)

    def doubled(p: Any, x: Any) -> Any:
        value, mask, step = x
        a = value["a"] * p["s"][None] * mask[:, None].astype(jnp.float32)
        return {"a": a, "b": jnp.sin(value["a"])}, mask, step + 1

    def summed(p: Any, x: Any) -> jax.Array:
        return (x[0]["a"] + x[0]["b"]) @ p["w"] * x[2].astype(jnp.float32)

    layers = [masked, doubled, summed]
    model = js.LayeredModel(layers, lambda out, batch: jnp.mean((out - batch["y"]) ** 2))
    draw = np.random.default_rng(0).normal
    params = [{"w": draw(size=(3, 4))}, {"s": np.ones(4)}, {"w": draw(size=(4, 2))}]
    params = jax.tree.map(np.float32, params)
    batch = {"x": np.float32(draw(size=(8, 3))), "mask": np.arange(8) % 3 > 0}
    batch["y"] = np.float32(draw(size=(8, 2)))
    mesh = jax.make_mesh((3,), ("stage",), devices=jax.devices()[:3])
    schedule = js.schedules.zero_bubble(3, 2)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor="host")
    with pytest.raises(ValueError, match=r"stage 0 gives .* stage 1 .*`executor`=\"host\""):
        jax.eval_shape(js.pipelined(model, params, schedule, mesh=mesh), params, batch)
    known = jax.jit(jax.value_and_grad(model))(params, batch)
    assert_close(jax.value_and_grad(pipe)(params, batch), known)
