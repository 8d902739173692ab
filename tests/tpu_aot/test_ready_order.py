"""Buckets in the order in which gradients are ready, as TPU compilers schedule their exchange.

Names sort as `block0`, ..., `head`, `stem`. The stem comes first in the model and its gradient last
of all, so in reverse leaf order the first bucket waits for the whole backward pass, and the second
for all of it but the stem.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tree import leaf_names
from support.described import shapes_on
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

WIDTH = 256
BLOCKS = [f"block{i}" for i in range(8)]
USE = ["stem", *BLOCKS, "head"]
PARAMS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in USE}
# Forward, and backward to the weights and (but for the first layer) to the input.
PRODUCTS = 10 + 9 + 10


def mlp_loss(params, x):
    for name in USE:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def compiled(mesh, order, rows):
    """The text of a step of `rows` examples per replica, five layers to a bucket."""
    five = 5 * 4 * WIDTH**2
    tx = js.all_reduce_gradients("replica", first_bucket_bytes=five, bucket_bytes=five, order=order)

    def step(stacked, x):
        params = jax.tree.map(lambda p: p[0], stacked)
        means, _ = tx.update(jax.grad(mlp_loss)(params, x), tx.init(params), params)
        return jax.tree.map(lambda p, g: (p - 0.1 * g)[None], params, means)

    specs, count = P("replica"), mesh.shape["replica"]
    lifted = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), PARAMS)
    x = jax.ShapeDtypeStruct((count * rows, WIDTH), jnp.float32)
    lowered = jax.jit(lifted).lower(*shapes_on((stacked, x), mesh, specs))
    assert lowered.as_text().count("stablehlo.all_reduce") == 2
    return lowered.compile().as_text() or ""


def ready():
    order = js.gradients.ready_order(
        mlp_loss, PARAMS, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    )
    names = leaf_names(PARAMS)
    assert [names[i] for i in order] == USE[::-1] != names[::-1]
    return order


def products_behind(text):
    """How many instructions with products come behind the start of each bucket's exchange."""
    schedule = read_schedule(text)
    assert schedule.num_products == PRODUCTS
    assert len(schedule.starts) == 2
    return [sum(place > start for place in schedule.products) for start in schedule.starts]


def test_first_bucket_starts_before_the_backward_pass_ends():
    """Between slices, where exchanges run beside products; in leaf order they have fewer to run by.

    Which bucket comes first in the list does not matter, since the compiler exchanges first what is
    ready first; what matters is which gradients share a bucket.
    """
    mesh = tpu_mesh("v5e:2x2", {"replica": 2, "device": 4}, num_slices=2)
    early = products_behind(compiled(mesh, ready(), rows=4096))
    late = products_behind(compiled(mesh, "reverse", rows=4096))
    # Of 19 products of the backward pass the first bucket needs 9, five weights' and four inputs'.
    assert early[0] >= 8
    assert early[0] - late[0] >= 3
    assert early[-1] == late[-1] == 0


def test_inside_a_slice_the_exchange_is_one():
    """There the compiler merges all buckets: one all-reduce that waits for the last gradient."""
    text = compiled(tpu_mesh("v5e:2x4", {"replica": 8}), ready(), rows=64)
    assert text.count(" all-reduce(") == 1
    schedule = read_schedule(text)
    assert (schedule.num_products, schedule.starts) == (PRODUCTS, ())
