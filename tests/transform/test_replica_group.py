"""Groups of replicas: how leaves are cut into blocks, and what large leaves are sent in."""

import math

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import split_dimension
from jaxslowmo.tree import noted_buffers

REPLICAS = 4
RNG = np.random.default_rng(0)


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(1, 6), st.data())
def test_a_leaf_is_cut_along_a_dimension_that_divides(shape, parts, data):
    """The first one, of those that are whole inside a replica if there is one."""
    inner = [data.draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0])) for size in shape]
    without = data.draw(st.none() | st.integers(0, 3))
    found = split_dimension(shape, parts, inner, without)
    sizes = zip(shape, inner, strict=True)
    fits = [d for d, (size, n) in enumerate(sizes) if size % (n * parts) == 0 and d != without]
    if 0 in shape:
        fits = []
    best = [d for d in fits if inner[d] == 1] or fits
    assert found == (best[0] if best else None)


def test_large_leaves_are_scattered_as_they_lie(mesh_of):
    """Each in a collective of its own; small ones, and those of scattered blocks, share one."""
    axes = {"row": 2, "column": 2}
    names = tuple(axes)
    shapes = {
        "first": (1024, 256),
        "second": (3, 512, 256),
        "broken": (3, 4, 100000),
        "rows": (100000, 3),
        "s": (8,),
    }
    tree = {n: RNG.normal(size=(REPLICAS, *s)).astype(np.float32) for n, s in shapes.items()}
    group = js.spec.ReplicaGroup(names)

    def one(tree):
        blocks = group.mean_scatter(jax.tree.map(lambda x: x[0], tree))
        whole = group.all_gather(blocks, jax.tree.map(lambda x: x[0], tree))
        return jax.tree.map(lambda x: x[None], (blocks, whole))

    mesh = mesh_of(axes)
    spec = P(names)
    fn = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))
    blocks, whole = fn(jax.device_put(tree, NamedSharding(mesh, spec)))
    for name, x in tree.items():
        mean = np.broadcast_to(x.mean(0), x.shape)
        np.testing.assert_allclose(whole[name], mean, atol=1e-6)
    along = np.concatenate(list(np.asarray(blocks["second"])), axis=1)
    np.testing.assert_allclose(along, tree["second"].mean(0), atol=1e-6)
    rows = js.comm_report(fn, tree).select(level="emitted")
    scattered = [row for row in rows if row.collective == "reduce-scatter"]
    assert sum(row.count for row in scattered) == 4 * len(axes)


def test_what_large_leaves_are_sent_in(mesh_of):
    """Small leaves in one buffer, large ones as they lie, the largest in blocks, in place."""
    shapes = {"block": (2**18 + 1, 16), "large": (2**18,), "a": (3,), "b": (2**17,)}
    types = {n: jax.ShapeDtypeStruct((REPLICAS, *s), np.float32) for n, s in shapes.items()}
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}

    def one(due, tree):
        def mean(tree):
            own = jax.tree.map(lambda x: x[0], tree)
            return jax.tree.map(
                lambda x: x[None], js.spec.ReplicaGroup("replica").mean(own, role="a")
            )

        return jax.lax.cond(due, mean, lambda tree: tree, tree)

    spec = P("replica")
    mapped = jax.shard_map(
        one, mesh=mesh_of({"replica": 4}), in_specs=(P(), spec), out_specs=spec, check_vma=False
    )
    fn = jax.jit(mapped, donate_argnums=1)
    with noted_buffers() as noted:
        report = js.comm_report(fn, jax.ShapeDtypeStruct((), bool), types)
    # A block is one row in 64, rounded up; what is left is another. The compiler joins all that are
    # outside of the loop.
    turns = (2**18 + 1) // 4097
    for level, count in (("emitted", turns + 3), ("compiled", turns + 1)):
        which = {"kind": "conditional", "axis": "replica", "level": level}
        assert report.bytes(**which) == sum(sizes.values())
        assert report.count(**which) == count
    assert {x.leaves: x.size_bytes for x in noted} == {
        ("block",): sizes["block"],
        ("large",): sizes["large"],
        ("a", "b"): sizes["a"] + sizes["b"],
    }
    memory = fn.lower(jax.ShapeDtypeStruct((), bool), types).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * sizes["large"]
