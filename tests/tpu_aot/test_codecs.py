"""What codecs and hooks narrow stays narrow where a TPU compiler made the program.

(A compiler for CPUs widens bfloat16.)
"""

import math
import re

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.described import lowered_update, report_of_sync
from support.reports import merged
from support.tpu_slices import tpu_mesh

MATRIX, VECTOR, REPLICAS = (256, 512), (3000,), 8
PARAMS = {
    "matrix": jax.ShapeDtypeStruct(MATRIX, jnp.float32),
    "vector": jax.ShapeDtypeStruct(VECTOR, jnp.float32),
}
SIZE = 256 * 512 + 3000
# Type, dimensions, tiles and kind of an instruction.
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\]\{[\d,]+:(T[(),\d]+)\S*\} "
    r"(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def mesh():
    return tpu_mesh("v5e:2x4", {"replica": REPLICAS})


def test_a_compiled_exchange_is_in_16_bits():
    sync = js.local_sgd("replica", sync_every=2, codec=js.codecs.bfloat16())
    (row,) = report_of_sync(sync, PARAMS, mesh(), ("average",)).select(level="compiled")
    assert (row.axis, row.count, row.dtypes) == ("replica", 1, ("bfloat16",))
    assert 2 * SIZE <= row.bytes <= 1.01 * 2 * SIZE


def test_a_compiled_slow_step_is_in_few_bits():
    sync = js.diloco("replica", sync_every=2, codec=js.codecs.int4(), shard_state=True)
    report = report_of_sync(sync, PARAMS, mesh(), ("slow",))
    plain = 2 * 4 * SIZE * (REPLICAS - 1) / REPLICAS  # an all-reduce of float32
    for level in ("emitted", "compiled"):
        rows = report.select(level=level)
        assert {row.collective for row in rows} == {"all-to-all", "all-gather"}, level
        assert {row.dtypes for row in rows} == {("uint8",)}, level
        assert report.wire_bytes(level=level) <= 0.15 * plain, level


def test_bytes_stay_bytes():
    """In tiles of whole rows too, so that no padding travels besides."""
    tx = js.all_reduce_gradients("replica", hook=js.hooks.int8(), bucket_bytes=10**9)
    lowered = lowered_update(tx, jax.ShapeDtypeStruct((250_000,), jnp.float32), mesh())
    report = js.comm_report_of(lowered, mesh=mesh(), compile=False)
    assert all(row.dtypes == ("uint8",) for row in report.rows)
    plain = 2 * 4 * 250_000 * (REPLICAS - 1) // REPLICAS  # an all-reduce of float32
    assert report.wire_bytes() <= 0.26 * plain
    # Compiled once, so read here: the same collectives of the same bytes, and none besides.
    found = COLLECTIVE.findall(lowered.compile().as_text())
    rows = merged(report.rows)
    assert [op for *_, op in found] == [row.collective for row in rows]
    for (dtype, dims, tiles, _), row in zip(found, rows, strict=True):
        assert (dtype, tiles) == ("u8", "T(8,128)(4,1)")
        assert math.prod(map(int, dims.split(","))) == row.bytes
