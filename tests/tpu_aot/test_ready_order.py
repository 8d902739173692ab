"""Gradients in the order in which they are ready, as TPU compilers schedule their exchange.

The stem comes first in the model and last by name, so in reverse leaf order the first bucket waits
for the whole backward pass.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.described import shapes_on
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

WIDTH, ROWS = 256, 4096
USE = ["stem", *(f"block{i}" for i in range(8)), "head"]
PARAMS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in USE}


def mlp_loss(params, x):
    for name in USE:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def products_behind(order):
    """How many products come behind the start of each of two buckets' exchange between slices."""
    mesh = tpu_mesh("v5e:2x2", {"replica": 2, "device": 4}, num_slices=2)
    five = 5 * 4 * WIDTH**2
    tx = js.all_reduce_gradients("replica", first_bucket_bytes=five, bucket_bytes=five, order=order)

    def step(stacked, x):
        params = jax.tree.map(lambda p: p[0], stacked)
        means, _ = tx.update(jax.grad(mlp_loss)(params, x), tx.init(params), params)
        return jax.tree.map(lambda p, g: (p - 0.1 * g)[None], params, means)

    specs = P("replica")
    lifted = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((2, *s.shape), s.dtype), PARAMS)
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32)
    compiled = jax.jit(lifted).lower(*shapes_on((stacked, x), mesh, specs)).compile()
    schedule = read_schedule(compiled.as_text() or "")
    assert schedule.num_products == 29  # 10 forward; 10 of weights and 9 of inputs
    return [sum(place > start for place in schedule.products) for start in schedule.starts]


def test_first_bucket_is_exchanged_during_the_backward_pass():
    """It needs 9 of 19 products of the backward pass, five weights' and four inputs'."""
    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    early = products_behind(js.gradients.ready_order(mlp_loss, PARAMS, x))
    late = products_behind("reverse")
    assert len(early) == len(late) == 2
    assert early[0] >= 8
    assert early[0] - late[0] >= 3
    assert early[-1] == late[-1] == 0
