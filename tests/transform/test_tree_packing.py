"""Trees as flat buffers: taken apart again they are the same, and they are planned once."""

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import Exchange, packing_of
from jaxslowmo.transform import _tree_packing as packing_module
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


@given(LEAVES, BUCKETS)
def test_packed_and_unpacked_is_the_same_tree(leaves, bucket_bytes):
    with jax.enable_x64(True):
        tree = numbered(leaves)
        packing = packing_of(tree, Exchange("replica", bucket_bytes=bucket_bytes))
        flats = packing.pack(tree)
        for buffer, flat in zip(packing.buffers(), itertools.chain(*flats), strict=True):
            assert (flat.size, flat.dtype) == (buffer.num_elements, buffer.dtype)
        assert sum(b.num_elements for b in packing.buffers()) == sum(x.size for x in tree)
        if bucket_bytes is None:
            assert len(packing.buffers()) == len({x.dtype for x in tree})
        assert_same(packing.unpack(flats), tree)


@given(LEAVES, BUCKETS)
def test_through_buffers_is_packed_mapped_and_unpacked(leaves, bucket_bytes):
    def more(buffer, flat, by):
        assert flat.dtype == buffer.dtype
        return flat + by.astype(flat.dtype)

    with jax.enable_x64(True):
        tree, one = numbered(leaves), np.float32(1)
        packing = packing_of(tree, Exchange("replica", bucket_bytes=bucket_bytes))
        wanted = [x + np.ones([], x.dtype) for x in tree]

        @jax.jit
        def both(tree):
            through = packing.through(more, tree, one)
            return through, packing.unpack(packing.map(more, packing.pack(tree), one))

        for found in both(tree):
            assert_same(found, wanted)


@given(LEAVES)
def test_leaves_may_travel_wider_than_they_are(leaves):
    with jax.enable_x64(True):
        tree = numbered(leaves)
        packing = packing_of(tree, Exchange("replica"), at_least_float32)
        wide = [x.astype(at_least_float32(x.dtype)) for x in tree]
        assert {b.dtype for b in packing.buffers()} == {x.dtype for x in wide}
        assert_same(packing.unpack(packing.pack(tree)), wide)


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


# One plan


@pytest.fixture
def planned(monkeypatch):
    """How often buffers and groups were planned, from now on and for new kinds of trees."""
    calls: Counter = Counter()

    def counting(name):
        real = getattr(packing_module, name)

        def call(*args, **options):
            calls[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(packing_module, name, call)

    counting("plan_buffers")
    counting("block_groups")
    packing_module._planned.cache_clear()
    return calls


@pytest.mark.parametrize(
    ("dtypes", "shard_state", "kinds"),
    [
        (["float32"], True, 1),
        (["float32"], False, 1),
        (["float32", "bfloat16"], True, 2),  # averages in bfloat16, slow steps in float32
    ],
)
def test_a_first_step_plans_each_kind_of_tree_once(planned, dtypes, shard_state, kinds):
    """State and step of slowmo: the base's average, anchor, slow average, and back."""
    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, shard_state=shard_state)
    params = {f"p{i}": jnp.ones((4, 5), dtype) for i, dtype in enumerate(dtypes)}

    def first(params):
        state = sync.init(params)
        updates, state = sync.update(params, state, params)
        return sync.update(updates, state, optax.apply_updates(params, updates))

    jax.jit(jax.vmap(first, axis_name="replica")).lower(params)
    assert planned == {"plan_buffers": kinds, "block_groups": kinds}


def test_another_size_of_buffers_or_another_mesh_is_another_plan(planned):
    tree = [jax.ShapeDtypeStruct((6,), jnp.float32)]
    for _ in range(2):
        packing_of(tree, Exchange("replica"))
        packing_of(tree, Exchange("replica", bucket_bytes=8))
        with jax.sharding.use_abstract_mesh(js.make_mesh({"replica": 2}).abstract_mesh):
            packing_of(tree, Exchange("replica"))
    assert planned == {"plan_buffers": 3, "block_groups": 3}


def test_specs_that_were_given_stay():
    given_specs = Exchange("replica", param_specs={"w": P("fsdp")})
    assert given_specs.with_specs({"w": P()}) is given_specs
    assert Exchange("replica").with_specs({"w": P()}).param_specs == {"w": P()}
