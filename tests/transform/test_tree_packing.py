"""Trees as flat buffers: taken apart again they are the same, and they are planned once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxslowmo.transform import Exchange, packing_of, replica_mean
from jaxslowmo.tree import at_least_float32

DTYPES = st.sampled_from(["float32", "bfloat16", "float64"])
LEAVES = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES), max_size=6)
BUCKETS = st.sampled_from([None, 0, 30, 400])


def numbered(leaves) -> list[np.ndarray]:
    """Values of which bfloat16 loses nothing."""
    return [
        (np.arange(math.prod(shape)).reshape(shape) + i).astype(jnp.dtype(dtype))
        for i, (shape, dtype) in enumerate(leaves)
    ]


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@given(LEAVES, BUCKETS, st.booleans())
def test_packed_and_unpacked_is_the_same_tree(leaves, bucket_bytes, wide):
    """Through buffers likewise; leaves may travel wider than they are."""

    def more(buffer, flat, by):
        assert (flat.size, flat.dtype) == (buffer.num_elements, buffer.dtype)
        return flat + by.astype(flat.dtype)

    with jax.enable_x64(True):
        tree, one = numbered(leaves), np.float32(1)
        dtype_of = at_least_float32 if wide else np.dtype
        packing = packing_of(tree, Exchange("replica", bucket_bytes=bucket_bytes), dtype_of)
        sent = [x.astype(dtype_of(x.dtype)) for x in tree]
        assert sum(b.num_elements for b in packing.buffers()) == sum(x.size for x in tree)
        if bucket_bytes is None:
            assert sorted(b.dtype for b in packing.buffers()) == sorted({x.dtype for x in sent})
        assert_same(packing.unpack(packing.pack(tree)), sent)

        @jax.jit
        def both(tree):
            through = packing.through(more, tree, one)
            return through, packing.unpack(packing.map(more, packing.pack(tree), one))

        for found in both(tree):
            assert_same(found, [x + np.ones([], x.dtype) for x in sent])


def test_each_device_packs_its_own_blocks(mesh_of):
    """Of leaves that are sharded inside a replica; the others stand in buffers of their own."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    specs = {"b": P(), "v": P("fsdp"), "w": P(None, "fsdp")}
    tree = {"b": np.ones(3), "v": np.arange(8.0), "w": np.arange(24.0).reshape(3, 8)}
    tree = {name: np.float32(x) for name, x in tree.items()}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in tree.items()}
    sizes = []

    def per_replica(tree):
        packing = packing_of(tree, Exchange("replica", param_specs=specs))

        def double(buffer, flat):
            sizes.append((buffer.num_elements, flat.shape))
            return 2 * flat

        return packing.unpack(packing.pack(tree, double))

    mapped = jax.shard_map(
        per_replica, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"replica"}
    )
    found = jax.jit(mapped)(placed)
    assert sorted(sizes) == [(3, (3,)), (2 + 6, (8,))]
    assert_same(found, jax.tree.map(lambda x: 2 * x, tree))
    assert found["w"].sharding.spec == P(None, "fsdp")


# The mean of the replicas through flat buffers

REPLICAS = 4


def meant(tree, weights=None, local=None, bucket_bytes=None):
    """The mean of stacked trees, under vmap."""
    over = Exchange("replica", local, None, bucket_bytes)

    def one(tree, weight):
        return replica_mean(tree, over, None if weights is None else weight)

    if local is not None:
        one = jax.vmap(one, axis_name=local, axis_size=2, in_axes=None, out_axes=None)
    weight = np.ones(REPLICAS, np.float32) if weights is None else np.float32(weights)
    return jax.jit(jax.vmap(one, axis_name="replica"))(tree, weight)


@settings(max_examples=8)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=2).map(tuple), max_size=4),
    weights=st.none() | st.lists(st.integers(0, 3), min_size=REPLICAS, max_size=REPLICAS),
    bucket_bytes=st.sampled_from([None, 0, 40]),
    local=st.sampled_from([None, "device"]),
)
def test_the_mean_is_as_numpy_says(shapes, weights, bucket_bytes, local):
    """In the dtypes of the leaves; the tree itself where nobody weighs anything."""
    rng = np.random.default_rng(0)
    tree = [rng.normal(size=(REPLICAS, *shape)).astype(np.float32) for shape in shapes]
    tree += [np.full((REPLICAS, 3), 2, dtype) for dtype in (np.float16, jnp.bfloat16)]
    for found, x in zip(meant(tree, weights, local, bucket_bytes), tree, strict=True):
        share = np.ones(REPLICAS) if weights is None else np.asarray(weights, float)
        wanted = np.float64(x)
        if share.any():
            wanted = np.broadcast_to(np.tensordot(share / share.sum(), wanted, 1), x.shape)
        assert found.dtype == x.dtype
        near = 1e-6 if x.dtype == np.float32 else 2.0**-7  # half precision rounds each product
        np.testing.assert_allclose(np.float64(found), wanted, rtol=near, atol=near)


def test_float16_does_not_overflow_where_one_replica_weighs_most():
    """Large values, and a weight four times the mean: the product alone would not fit."""
    found = meant(np.full((REPLICAS, 6), 30000, np.float16), [1, 0, 0, 0])
    np.testing.assert_allclose(np.asarray(found, np.float32), 30000, rtol=1e-3)
