"""Collectives in transforms of others, found in the traced update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxslowmo as js
from jaxslowmo.tracing import collective_axes, unnamed_exchanges

PARAMS = {"w": np.ones((2, 3), np.float32)}
MESHES = {
    "devices": js.make_mesh({"replica": 2, "device": 2}),
    "virtual": js.virtual_mesh({"replica": 2, "device": 2}),
}


def found(tx, kind):
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *jnp.shape(x))), tx.init(PARAMS))
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(lambda x: np.stack([x, x]), PARAMS)
    return unnamed_exchanges(tx, params, state, mesh=MESHES[kind], axis_name="replica")


def mean_over(axis):
    return optax.stateless(lambda grads, params: jax.lax.pmean(grads, axis))


def in_a_branch():
    def update(grads, params):
        constant = jax.tree.map(jnp.zeros_like, grads)
        varying = jnp.sum(grads["w"]) > 0
        mean = jax.lax.cond(varying, lambda: grads, lambda: constant)
        return jax.lax.pmean(mean, "replica")

    return optax.stateless(update)


CASES = {
    "nothing": (optax.adam(0.1), set()),
    "a mean": (mean_over("replica"), {"replica"}),
    "over several": (
        optax.chain(optax.clip(1.0), mean_over(("replica", "device"))),
        {"replica", "device"},
    ),
    "where types are in the way": (in_a_branch(), {"replica"}),
    "a loss that it needs": (optax.chain(optax.polyak_sgd(), mean_over("device")), {"device"}),
    "ours": (js.chain(js.all_reduce_gradients("replica"), js.local_sgd("replica")), set()),
    "named": (js.gradient_transform(mean_over("replica")), set()),
    "what cannot be traced": (mean_over("nowhere"), set()),
    "no more than it knows": (optax.contrib.sam(optax.sgd(0.1), mean_over("replica")), {"replica"}),
}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_axes(name, kind):
    tx, axes = CASES[name]
    if name != "ours":
        assert found(tx, kind) == axes
        return
    sent = found(js.all_reduce_gradients("replica"), kind)
    assert sent == axes


def test_axes_of_the_collectives_in_a_program():
    def program(x):
        inner = jax.vmap(lambda v: v + lax.pmean(v, "run"), axis_name="run")(x)
        y = jax.jit(lambda v: lax.ppermute(v, "replica", [(0, 1), (1, 0)]))(inner)
        z = lax.cond(y[0, 0] > 0, lambda v: lax.psum(v, ("node", "replica")), lambda v: v, y)
        return z.sum() + lax.axis_index("slice")

    seen = []

    def one(x):
        seen.append(collective_axes(jax.make_jaxpr(program)(x).jaxpr))
        return x

    for name in ("replica", "node", "slice"):
        one = jax.vmap(one, axis_name=name)
    jax.eval_shape(one, jnp.ones((2, 2, 2, 3, 3)))
    assert seen == [{"replica", "node"}]
