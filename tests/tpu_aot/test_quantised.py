"""What hooks that pack bytes send where a TPU compiler made the program: bytes, not widened."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.described import shapes_on
from support.tpu_slices import tpu_mesh

# Type, dimensions, tiles and kind of an instruction.
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\]\{[\d,]+:(T[(),\d]+)\S*\} "
    r"(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)
SIZE, REPLICAS = 250_000, 8


def test_bytes_stay_bytes():
    """In tiles of whole rows too, so that no padding travels besides."""
    tx = js.all_reduce_gradients("replica", hook=js.hooks.int8(), bucket_bytes=10**9)

    def per_device(grads):
        means, state = tx.update(grads[0], tx.init(grads[0]))
        return means[None], jax.tree.map(lambda x: x[None], state.hook)

    mesh = tpu_mesh("v5e:2x4", {"replica": REPLICAS})
    spec = P("replica")
    step = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))
    lowered = step.lower(shapes_on(jax.ShapeDtypeStruct((REPLICAS, SIZE), jnp.float32), mesh, spec))
    report = js.comm_report_of(lowered, mesh=mesh, compile=False)
    assert all(row.dtypes == ("uint8",) for row in report.rows)
    plain = 2 * 4 * SIZE * (REPLICAS - 1) // REPLICAS  # an all-reduce of float32
    assert report.wire_bytes() <= 0.26 * plain
    # Compiled once, so read here: the same collectives of the same bytes, and none besides.
    found = COLLECTIVE.findall(lowered.compile().as_text())
    assert [op for *_, op in found] == [row.collective for row in report.rows]
    for (dtype, dims, tiles, _), row in zip(found, report.rows, strict=True):
        assert dtype == "u8"
        assert math.prod(map(int, dims.split(","))) == row.bytes
        assert tiles == "T(8,128)(4,1)"
