"""Shapes of shards, and the mean by way of shards."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import (
    all_gather_shards,
    all_mean,
    local_shard,
    mean_to_shards,
    shard_layout,
)
from jaxslowmo.collectives._scatter import ShardLayout
from support.executions import lift

TILE = 8 * 128
LARGE = 12_289 * 4 + 5
sizes = st.integers(0, 5_000) | st.integers(0, 3_000_000) | st.integers(0, 2_000_000_000)


@given(sizes, st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 8]))
def test_padding_is_bounded(num_elements, num_shards, num_parts):
    layout = shard_layout(num_elements, num_shards, num_parts=num_parts)
    assert math.prod(layout) * num_shards >= num_elements
    assert layout.rows % num_parts == 0
    part = math.prod(layout) // num_parts
    even = num_elements / (num_shards * num_parts)
    if layout.lanes == 1:
        assert math.ceil(even) <= 2 * TILE
        assert part == max(1, math.ceil(even))
    else:
        assert (part % TILE, layout.lanes) == (0, 128)
        assert part >= 3 * TILE
        assert part - even < max(0.01 * even, 2 * TILE)


@pytest.mark.parametrize(
    ("elements", "shards", "parts", "rows", "lanes"),
    [
        (0, 4, 1, 1, 1),
        (10, 4, 1, 3, 1),
        (10, 4, 2, 4, 1),
        (2 * TILE, 1, 1, 2 * TILE, 1),
        (2 * TILE + 1, 1, 1, 4 * 8, 128),  # 3 tiles, and an even number
        (400 * TILE, 1, 1, 400 * 8, 128),
        (400 * TILE + 1, 1, 1, 404 * 8, 128),  # in 4 spans from here on
        (1_000_000, 4, 1, 246 * 8, 128),
        (1_000_000, 2, 2, 2 * 246 * 8, 128),
        (124_000_000, 4, 1, 30_464 * 8, 128),  # 256 spans of 119 tiles
    ],
)
def test_shapes_of_shards_by_hand(elements, shards, parts, rows, lanes):
    assert shard_layout(elements, shards, num_parts=parts) == ShardLayout(rows, lanes)


CASES = {
    "8": ({"replica": 8}, ("replica",), None, 7),
    "4 by 2 local": ({"replica": 4, "device": 2}, ("replica",), "device", 7),
    "4 x 2 reversed": ({"node": 2, "replica": 4}, ("replica", "node"), None, 7),
    "1 x 4": ({"node": 1, "replica": 4}, ("node", "replica"), None, 7),
    "2 x 2 by 2": ({"node": 2, "replica": 2, "device": 2}, ("node", "replica"), "device", LARGE),
}


@pytest.mark.parametrize("place", ["devices", "vmap"])
@pytest.mark.parametrize(("axes", "replica_axes", "local", "size"), CASES.values(), ids=CASES)
def test_mean_by_way_of_shards_is_the_mean(place, axes, replica_axes, local, size):
    replicas = math.prod(axes[a] for a in replica_axes)
    parts = 1 if local is None else axes[local]
    layout = shard_layout(size, replicas, num_parts=parts)

    def fn(x, equal):
        shard = mean_to_shards(x, layout, replica_axes, local)
        gathered = all_gather_shards(shard, size, replica_axes, local)
        direct = all_mean(x, replica_axes, local)
        own = local_shard(direct, layout, replica_axes)
        kept = local_shard(equal, layout, replica_axes)
        kept = all_gather_shards(kept, size, replica_axes, local)
        return {"gathered": gathered, "direct": direct, "shard": shard, "own": own, "kept": kept}

    of_replicas = tuple(a for a in axes if a in replica_axes)
    lead = tuple(axes[a] for a in of_replicas)
    rows = np.random.default_rng(size).normal(size=(*lead, size)).astype(np.float32)
    if place == "vmap":
        program = fn
        for name in reversed(list(axes)):
            in_axes = (0 if name in of_replicas else None, None)
            program = jax.vmap(program, in_axes, axis_name=name, axis_size=axes[name])
    else:
        every = (None,) * len(axes)
        program = jax.shard_map(
            lambda x, y: jax.tree.map(lambda v: v[every], fn(x.reshape(size), y)),
            mesh=js.make_mesh(axes),
            in_specs=(P(*of_replicas), P()),
            out_specs=P(*axes),
            check_vma=False,
        )
    equal = rows.reshape(-1, size)[0]
    out = jax.jit(program)(rows, equal)
    found = {name: np.asarray(x).reshape(math.prod(axes.values()), -1) for name, x in out.items()}
    mean = rows.reshape(-1, size).astype(np.float64).mean(0)
    for name in ("gathered", "direct"):
        np.testing.assert_allclose(found[name][0], mean, atol=1e-6)
        assert np.array_equal(found[name], np.broadcast_to(found[name][0], found[name].shape)), name
    # A shard is the part that `local_shard` takes, so anchors and averages line up.
    np.testing.assert_allclose(out["shard"], out["own"], atol=1e-6)
    assert out["shard"].shape[-2:] == (layout.rows, layout.lanes)
    assert np.array_equal(found["kept"], np.broadcast_to(equal, found["kept"].shape))


def test_results_are_typed_as_equal_over_the_local_axis():
    layout = shard_layout(5, 4, num_parts=2)

    def per_replica(x):
        shard = mean_to_shards(x, layout, "replica", "device")
        return all_gather_shards(shard, 5, "replica", "device"), shard

    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    whole, shards = lift(per_replica, {"replica": 4, "device": 2}, "shard_map", (False,))(x)
    np.testing.assert_allclose(whole, np.broadcast_to(x.mean(0), (4, 5)))
    np.testing.assert_allclose(np.asarray(shards).reshape(-1)[:5], x.mean(0))
