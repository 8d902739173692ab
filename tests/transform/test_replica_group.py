"""Groups of replicas: how leaves are cut into blocks, and the verbs against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import _means
from jaxslowmo.transform import _replica_group, split_dimension
from jaxslowmo.tree import noted_buffers
from support.executions import EXECUTIONS, lift
from support.limits import TAKES_EMPTY_ARRAYS

REPLICAS = 4
SHAPES = {"cut": (8, 3), "empty": (0, 4), "last": (3, 2, 4), "scalar": (), "whole": (3,)}
BLOCKS = {"cut": (2, 3), "empty": (0, 4), "last": (3, 2, 1), "scalar": (), "whole": (3,)}
if not TAKES_EMPTY_ARRAYS:
    del SHAPES["empty"], BLOCKS["empty"]
RNG = np.random.default_rng(0)
STACKED = {
    name: RNG.normal(size=(REPLICAS, *shape)).astype(np.float32) for name, shape in SHAPES.items()
}
MEANS = {name: x.mean(0, dtype=np.float64) for name, x in STACKED.items()}


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


def test_dimensions_by_hand():
    assert [split_dimension(s, 4) for s in ((8, 3), (3, 8), (3,), ())] == [0, 1, None, None]
    assert split_dimension((8, 8), 4, (2, 1)) == 1
    assert split_dimension((8, 3), 4, (2, 1)) == 0
    assert split_dimension((6, 3), 3, (2, 1)) == 1
    assert split_dimension((4, 3), 4, (2, 1)) is None
    assert split_dimension((8, 8), 4, without=0) == 1


def trips(group):
    """Return a function from a tree of a replica to its way by blocks, and what blocks are."""

    def fn(tree):
        mean = group.mean(tree)
        blocks = group.mean_scatter(tree)
        return {
            "mean": mean,
            "blocks": blocks,
            "own": group.block(mean),
            "gathered": group.all_gather(blocks, tree),
            "back": group.all_gather(group.block(mean), mean),
        }

    return fn


def check(found, of_first=range(2)):
    """`of_first` are the rows of "cut" that the first replica has."""
    found = jax.tree.map(np.asarray, found)
    for name, mean in MEANS.items():
        wanted = np.broadcast_to(mean, (REPLICAS, *mean.shape))
        for kind in ("mean", "gathered"):
            np.testing.assert_allclose(found[kind][name], wanted, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["back"][name], found["mean"][name])
        assert found["blocks"][name].shape == (REPLICAS, *BLOCKS[name])
        np.testing.assert_allclose(found["blocks"][name], found["own"][name], atol=1e-6)
    for replica in range(REPLICAS):
        rows = np.array(of_first) + replica * (2 if of_first[1] == 1 else 1)
        np.testing.assert_allclose(found["own"]["cut"][replica], MEANS["cut"][rows], atol=1e-6)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("bucket_bytes", [None, 40])
def test_blocks_of_the_mean(execution, bucket_bytes):
    group = js.spec.ReplicaGroup("replica", bucket_bytes=bucket_bytes)
    check(lift(trips(group), {"replica": REPLICAS}, execution, (False,))(STACKED))


@pytest.mark.parametrize("execution", ["vmap", "shard_map_unchecked"])
def test_devices_of_a_replica_share_the_work(execution):
    group = js.spec.ReplicaGroup("replica", "device")
    axes = {"replica": REPLICAS, "device": 2}
    check(lift(trips(group), axes, execution, (False,))(STACKED))


@pytest.mark.parametrize("axes", [{"replica": 4}, {"row": 2, "column": 2}])
def test_large_leaves_are_scattered_as_they_lie(axes, mesh_of):
    """Each in a collective of its own; small ones, and those of scattered blocks, share one."""
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


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("codec", [None, js.codecs.float16()])
def test_means_of_large_leaves_are_those_of_packed_ones(monkeypatch, execution, codec):
    """To the bit, however many rows there are, and whatever replicas weigh."""
    shapes = [(63,), (64, 2), (65, 1), (130, 3), (1, 90), (2, 90), (3,), ()]
    rng = np.random.default_rng(1)
    tree = [rng.normal(size=(REPLICAS, *s)).astype(np.float32) for s in shapes]
    tree.append(rng.normal(size=(REPLICAS, 129)).astype(jnp.bfloat16))
    group = js.spec.ReplicaGroup("replica", codec=codec)
    weights = [np.full(REPLICAS, w, np.float32) for w in (1, 0)]
    weights.append(np.array([2, 0, 1, 0.5], np.float32))

    def means(tree, *weights):
        return [group.mean(tree), *(group.mean(tree, w) for w in weights)]

    def found():
        split = (False,) * (1 + len(weights))
        return lift(means, {"replica": REPLICAS}, execution, split)(tree, *weights)

    packed = found()
    monkeypatch.setattr(_replica_group, "LARGE_BYTES", 200)
    monkeypatch.setattr(_means, "_LARGE", 200)
    jax.tree.map(np.testing.assert_array_equal, found(), packed)


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


@pytest.mark.parametrize("explicit", [False, True])
def test_leaves_that_are_sharded_inside_a_replica_keep_their_layout(explicit, mesh_of):
    """They are cut along other dimensions first; without specs, if types do not tell, never."""
    mesh = mesh_of({"replica": REPLICAS, "model": 2}, explicit=explicit)
    specs = {"across": P(None, "model"), "along": P("model")}
    shapes = {"across": (8, 6), "along": (8, 3)}
    values = {n: RNG.normal(size=(REPLICAS, *s)).astype(np.float32) for n, s in shapes.items()}
    lies = {name: NamedSharding(mesh, P("replica", *spec)) for name, spec in specs.items()}
    placed = jax.device_put(values, lies)

    def found(group):
        def one(tree):
            out = trips(group)(jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), tree))
            return jax.tree.map(lambda x: x[None], out)

        spec = P("replica")
        return jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"})
        )(placed)

    ways = found(js.spec.ReplicaGroup("replica", param_specs=specs))
    assert ways["blocks"]["across"].shape == (REPLICAS, 2, 6)
    assert ways["blocks"]["along"].shape == (REPLICAS, 2, 3)
    for name, x in values.items():
        for kind in ("mean", "gathered", "back"):
            np.testing.assert_allclose(np.asarray(ways[kind][name])[1], x.mean(0), atol=1e-6)
        for kind in ("mean", "blocks"):
            assert ways[kind][name].sharding.is_equivalent_to(lies[name], 3)
    blocks, mean = (np.asarray(ways[kind]["across"]) for kind in ("blocks", "mean"))
    np.testing.assert_allclose(blocks.reshape(8, 6), mean[0], atol=1e-6)
    unknown = found(js.spec.ReplicaGroup("replica"))
    assert unknown["blocks"]["across"].shape == (REPLICAS, 2 if explicit else 8, 6)
    for kind in ("mean", "back"):
        np.testing.assert_allclose(unknown[kind]["across"], ways[kind]["across"], atol=1e-6)


def test_in_a_codec_what_is_lost_is_what_was_not_sent():
    group = js.spec.ReplicaGroup("replica", codec=js.codecs.int8())
    program = lift(group.mean_scatter_in_codec, {"replica": REPLICAS}, "vmap", (False,))
    blocks, lost = program(STACKED)
    for name in ("cut", "last"):
        axis = 1 + SHAPES[name].index(max(SHAPES[name]))
        found = np.concatenate([np.asarray(x) for x in blocks[name]], axis=axis - 1)
        sent = np.float64(STACKED[name]) - np.float64(lost[name])
        np.testing.assert_allclose(found, sent.mean(0), atol=1e-6)
        assert 0 < np.abs(lost[name]).max() < 0.05
    np.testing.assert_allclose(blocks["whole"][0], MEANS["whole"], atol=1e-6)
    assert not np.any(lost["whole"])


def test_a_dimension_of_layers_is_never_cut():
    group = js.spec.ReplicaGroup("replica", without=(lambda name: name == "cut", 0))
    found = lift(lambda tree: group.block(tree), {"replica": REPLICAS}, "vmap", (False,))(STACKED)
    assert {name: x.shape[1:] for name, x in found.items()} == BLOCKS | {"cut": (8, 3)}


def test_replicas_agree_where_all_do():
    group = js.spec.ReplicaGroup("replica")
    agree = jax.vmap(group.agree, axis_name="replica")
    assert agree(jnp.array([True, True])).tolist() == [True, True]
    assert agree(jnp.array([True, False])).tolist() == [False, False]


def test_sums_and_messages_of_trees():
    """A replica that none sends to receives zeros."""
    group = js.spec.ReplicaGroup("replica", bucket_bytes=8)
    tree = {"a": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones((3, 2), "bfloat16")}
    over = lambda fn: jax.vmap(fn, axis_name="replica")(tree)  # noqa: E731
    for name, x in over(group.sum).items():
        np.testing.assert_array_equal(x, np.broadcast_to(tree[name].sum(0), x.shape))
    sent = over(lambda x: group.permute(x, [(0, 2), (2, 1)]))
    for name, x in sent.items():
        assert x.dtype == tree[name].dtype
        np.testing.assert_array_equal(x[1:], tree[name][np.array([2, 0])])
        assert not np.any(x[0])


def test_layout_of_a_group():
    group = js.spec.ReplicaGroup(("a", "b"), "device", codec=js.codecs.int8())
    assert group.with_layout(None, P("x")).with_layout(None, P("y")).param_specs == P("x")
