"""Weights of a stage over an axis that is left to the compiler."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import language_model, tokens

SHARDED = {"up": P(None, "tensor"), "bias": P("tensor"), "down": P("tensor")}


def specs(blocks: int) -> list[Any]:
    return [{"table": P()}, *[SHARDED] * blocks, {"table": P(None, "tensor")}]


def test_gradients_are_those_of_the_whole_model_and_stay_sharded() -> None:
    model, params = language_model(2, tied=False)
    mesh = js.make_mesh({"replica": 2, "stage": 2, "tensor": 2})
    schedule = js.schedules.zero_bubble(2, 2)
    pipe = js.pipeline.HostPipeline(model, params, schedule, mesh=mesh, param_specs=specs(2))
    placed = pipe.place(params)
    assert placed[1]["up"].sharding.spec == P("replica", None, "tensor")
    batch = tokens(8)
    (losses, _), grads = pipe.value_and_grad(placed, batch)
    whole_model = jax.jit(jax.value_and_grad(model, has_aux=True))
    for replica in range(2):
        own = jax.tree.map(lambda x, r=replica: x[4 * r : 4 * (r + 1)], batch)
        (expected, _), whole = whole_model(params, own)
        np.testing.assert_allclose(losses[replica], expected, rtol=1e-5)
        for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(got[replica], wanted, rtol=1e-5, atol=1e-6)

    def tx(specs: Any) -> optax.GradientTransformation:
        base = js.local_sgd("replica", sync_every=1, param_specs=specs)
        slow = js.slowmo("replica", base=base, sync_every=3, param_specs=specs)
        return js.chain(optax.sgd(0.1), slow)

    state, _ = pipe.step(pipe.init(tx, params), batch)
    assert state.params[1]["up"].addressable_shards[0].data.shape == (1, 4, 3)
    mean = jax.tree.map(lambda x, g: x - 0.1 * np.mean(np.asarray(g), 0), params, grads)
    for got, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(got[1], wanted, rtol=1e-5, atol=1e-6)


def test_specs_of_other_axes_are_refused() -> None:
    model, params = language_model(2, tied=False)
    mesh = js.make_mesh({"replica": 2, "stage": 2, "tensor": 2})
    pipe = js.pipeline.HostPipeline(
        model,
        params,
        js.schedules.gpipe(2, 2),
        mesh=mesh,
        data_axes=("tensor",),
        param_specs=specs(2),
    )
    with pytest.raises(ValueError, match=r"left to the compiler, \[\], got \['tensor'\]"):
        pipe.place(params)
