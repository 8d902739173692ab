"""Shapes of shards, and the mean by way of shards."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import (
    all_gather_shards,
    all_mean,
    all_mean_in_slices,
    local_shard,
    mean_to_shards,
    shard_layout,
)
from support.exhaustive import sweep

TILE = 8 * 128
sizes = st.integers(0, 5_000) | st.integers(0, 3_000_000) | st.integers(0, 2_000_000_000)


@given(sizes, st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 8]))
def test_padding_is_bounded(num_elements, num_shards, num_parts):
    layout = shard_layout(num_elements, num_shards, num_parts=num_parts)
    assert layout.size * num_shards >= num_elements
    assert layout.rows % num_parts == 0
    part = layout.size // num_parts
    even = num_elements / (num_shards * num_parts)
    if layout.lanes == 1:
        assert math.ceil(even) <= 2 * TILE
        assert part == max(1, math.ceil(even))
    else:
        assert (part % TILE, layout.lanes) == (0, 128)
        assert part >= 3 * TILE
        assert part - even < max(0.01 * even, 2 * TILE)


@given(st.integers(2, 400_000), st.integers(2, 64))
def test_state_of_a_replica_is_small(num_elements, num_shards):
    """Anchor and momentum, float32: within 1 % and 64 KiB of an even split."""
    held = 2 * 4 * shard_layout(num_elements, num_shards).size
    assert held <= 1.01 * 2 * 4 * num_elements / num_shards + 64 * 1024


def test_large_shards_are_cut_into_equal_spans_of_whole_tiles():
    for num_elements in (5_000_000, 124_000_000, 1_300_000_000):
        tiles = shard_layout(num_elements, 4).size // TILE
        spans = 2 ** max(1, math.ceil(math.log2(tiles / 201)))
        assert tiles % spans == 0


def on_mesh(fn, axes, data_axes, size):
    """`fn` on rows that differ over `data_axes` only; its results from every device."""
    lead = tuple(axes[a] for a in data_axes)
    rows = np.random.default_rng(size).normal(size=(*lead, size)).astype(np.float32)
    every = tuple(axes)

    def per_device(x):
        out = fn(x.reshape(size))
        out = jax.tree.map(lambda v: v[(None,) * len(every)], out)
        return out

    program = jax.shard_map(
        per_device,
        mesh=js.make_mesh(axes),
        in_specs=P(*data_axes),
        out_specs=P(*every),
        check_vma=False,
    )
    return rows, jax.jit(program)(rows)


def under_vmap(fn, axes, data_axes, size):
    lead = tuple(axes[a] for a in data_axes)
    rows = np.random.default_rng(size).normal(size=(*lead, size)).astype(np.float32)
    for name in reversed(list(axes)):
        fn = jax.vmap(
            fn, axis_name=name, axis_size=axes[name], in_axes=0 if name in data_axes else None
        )
    return rows, jax.jit(fn)(rows)


def by_shards(size, replica_axes, local, axes):
    replicas = math.prod(axes[a] for a in replica_axes)
    parts = 1 if local is None else axes[local]
    layout = shard_layout(size, replicas, num_parts=parts)
    name = replica_axes if len(replica_axes) > 1 else replica_axes[0]

    def fn(x):
        shard = mean_to_shards(x, layout, name, local)
        gathered = all_gather_shards(shard, size, name, local)
        direct = all_mean(x, name) if local is None else all_mean_in_slices(x, name, local)
        own = local_shard(direct, layout, name)
        kept = all_gather_shards(local_shard(x, layout, name), size, name, local)
        return {"gathered": gathered, "direct": direct, "shard": shard, "own": own, "kept": kept}

    return fn, layout


CASES = {
    "2": ({"replica": 2}, ("replica",), None),
    "4": ({"replica": 4}, ("replica",), None),
    "8": ({"replica": 8}, ("replica",), None),
    "4 by 2 local": ({"replica": 4, "device": 2}, ("replica",), "device"),
    "2 by 4 local": ({"replica": 2, "device": 4}, ("replica",), "device"),
    "2 x 2": ({"node": 2, "replica": 2}, ("node", "replica"), None),
    "4 x 2 reversed": ({"node": 2, "replica": 4}, ("replica", "node"), None),
    "2 x 2 by 2 local": ({"node": 2, "replica": 2, "device": 2}, ("node", "replica"), "device"),
    "1 x 4": ({"node": 1, "replica": 4}, ("node", "replica"), None),
}


@pytest.mark.parametrize(
    ("place", "case", "size"),
    sweep(
        itertools.product([on_mesh, under_vmap], CASES, [7, 12_289 * 4 + 5]),
        lambda place, case, size: (place is on_mesh) == (size == 7),
    ),
)
def test_mean_by_way_of_shards_is_the_mean(case, place, size):
    axes, replica_axes, local = CASES[case]
    fn, layout = by_shards(size, replica_axes, local, axes)
    data_axes = tuple(a for a in axes if a in replica_axes)
    rows, out = place(fn, axes, data_axes, size)
    mean = rows.reshape(-1, size).astype(np.float64).mean(0)
    num_devices = math.prod(axes.values())
    for name in ("gathered", "direct"):
        found = np.asarray(out[name]).reshape(num_devices, size)
        np.testing.assert_allclose(found, np.broadcast_to(mean, found.shape), atol=1e-6)
        assert np.array_equal(found, np.broadcast_to(found[0], found.shape)), name
    # A shard is the part that `local_shard` takes, so anchors and averages line up.
    np.testing.assert_allclose(out["shard"], out["own"], atol=1e-6)
    assert out["shard"].shape[-2:] == (layout.rows, layout.lanes)


def test_local_shards_of_equal_buffers_gather_to_the_buffer():
    axes = {"node": 2, "replica": 2, "device": 2}
    for place in (on_mesh, under_vmap):
        fn, _ = by_shards(13, ("node", "replica"), "device", axes)
        rows, out = place(fn, axes, (), 13)
        assert np.array_equal(out["kept"], np.broadcast_to(rows, (2, 2, 2, 13)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_are_typed_as_equal_over_the_local_axis(check_vma):
    def per_device(x):
        layout = shard_layout(5, 4, num_parts=2)
        shard = mean_to_shards(x[0], layout, "replica", "device")
        return all_gather_shards(shard, 5, "replica", "device")[None], shard[None]

    program = jax.shard_map(
        per_device,
        mesh=js.make_mesh({"replica": 4, "device": 2}),
        in_specs=P("replica"),
        out_specs=P("replica"),
        check_vma=check_vma,
    )
    x = jnp.arange(20.0).reshape(4, 5)
    whole, shards = jax.jit(program)(x)
    np.testing.assert_allclose(whole, np.broadcast_to(x.mean(0), (4, 5)))
    np.testing.assert_allclose(np.asarray(shards).reshape(-1)[:5], x.mean(0))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_float16_means_do_not_overflow(count):
    x = jnp.full((count, 3), 60_000, jnp.float16)
    mean = jax.vmap(lambda v: all_mean(v, "replica"), axis_name="replica")(x)
    np.testing.assert_allclose(np.asarray(mean, np.float32), 60_000, rtol=1e-3)


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 8])
def test_replicas_that_agree_keep_their_value_up_to_rounding(replicas):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    stacked = np.broadcast_to(x, (replicas, 1000))
    mean = jax.vmap(lambda v: all_mean(v, "replica"), axis_name="replica")(stacked)
    assert np.array_equal(mean[0], mean[-1])
    if replicas in (2, 4):
        assert np.array_equal(mean[0], x)
    np.testing.assert_allclose(mean[0], x, rtol=replicas * 2.0**-24)
