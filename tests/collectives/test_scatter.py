"""Shapes of shards, and the mean by way of rows, one for each replica."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import all_gather_rows, all_mean, scatter_mean, shard_layout
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
def test_mean_by_way_of_rows_is_the_mean(place, axes, replica_axes, local, size):
    """`size` is that of a row; what is padded inside does not come out."""
    replicas = math.prod(axes[a] for a in replica_axes)
    whole = replicas * size

    def fn(x):
        row = scatter_mean(x.reshape(replicas, size), replica_axes, local)
        gathered = all_gather_rows(row, replica_axes, local)
        direct = all_mean(x, replica_axes, local)
        mine = direct.reshape(replicas, size)[jax.lax.axis_index(replica_axes)]
        return {"gathered": gathered, "direct": direct, "row": row, "mine": mine}

    of_replicas = tuple(a for a in axes if a in replica_axes)
    lead = tuple(axes[a] for a in of_replicas)
    values = np.random.default_rng(size).normal(size=(*lead, whole)).astype(np.float32)
    if place == "vmap":
        program = fn
        for name in reversed(list(axes)):
            in_axes = 0 if name in of_replicas else None
            program = jax.vmap(program, in_axes, axis_name=name, axis_size=axes[name])
    else:
        every = (None,) * len(axes)
        program = jax.shard_map(
            lambda x: jax.tree.map(lambda v: v[every], fn(x.reshape(whole))),
            mesh=js.make_mesh(axes),
            in_specs=P(*of_replicas),
            out_specs=P(*axes),
            check_vma=False,
        )
    out = jax.jit(program)(values)
    found = {name: np.asarray(x).reshape(math.prod(axes.values()), -1) for name, x in out.items()}
    mean = values.reshape(-1, whole).astype(np.float64).mean(0)
    for name in ("gathered", "direct"):
        np.testing.assert_allclose(found[name][0], mean, atol=1e-6)
        assert np.array_equal(found[name], np.broadcast_to(found[name][0], found[name].shape)), name
    np.testing.assert_allclose(found["row"], found["mine"], atol=1e-6)
    assert found["row"].shape[-1] == size


def test_results_are_typed_as_equal_over_the_local_axis():
    def per_replica(x):
        row = scatter_mean(x, "replica", "device")
        return all_gather_rows(row, "replica", "device"), row

    x = np.arange(80, dtype=np.float32).reshape(4, 4, 5)
    whole, rows = lift(per_replica, {"replica": 4, "device": 2}, "shard_map", (False,))(x)
    np.testing.assert_allclose(whole, np.broadcast_to(x.mean(0), (4, 4, 5)))
    np.testing.assert_allclose(rows, x.mean(0))
