"""Groups of replicas: how leaves are cut into blocks, and the verbs against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import split_dimension
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
        blocks = group.reduce_scatter(tree)
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
    group = js.ReplicaGroup("replica", bucket_bytes=bucket_bytes)
    check(lift(trips(group), {"replica": REPLICAS}, execution, (False,))(STACKED))


@pytest.mark.parametrize("execution", ["vmap", "shard_map_unchecked"])
def test_devices_of_a_replica_share_the_work(execution):
    group = js.ReplicaGroup("replica", "device")
    axes = {"replica": REPLICAS, "device": 2}
    check(lift(trips(group), axes, execution, (False,))(STACKED))


@pytest.mark.parametrize("explicit", [False, True])
def test_leaves_that_are_sharded_inside_a_replica_keep_their_layout(explicit, mesh_of):
    """They are cut along other dimensions first; without specs never."""
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

    ways = found(js.ReplicaGroup("replica", param_specs=specs))
    assert ways["blocks"]["across"].shape == (REPLICAS, 2, 6)
    assert ways["blocks"]["along"].shape == (REPLICAS, 2, 3)
    for name, x in values.items():
        for kind in ("mean", "gathered", "back"):
            np.testing.assert_allclose(np.asarray(ways[kind][name])[1], x.mean(0), atol=1e-6)
        for kind in ("mean", "blocks"):
            assert ways[kind][name].sharding.is_equivalent_to(lies[name], 3)
    blocks, mean = (np.asarray(ways[kind]["across"]) for kind in ("blocks", "mean"))
    np.testing.assert_allclose(blocks.reshape(8, 6), mean[0], atol=1e-6)
    unknown = found(js.ReplicaGroup("replica"))
    assert unknown["blocks"]["across"].shape == (REPLICAS, 8, 6)


def test_in_a_codec_what_is_lost_is_what_was_not_sent():
    group = js.ReplicaGroup("replica", codec=js.codecs.int8())
    program = lift(group.reduce_scatter_in_codec, {"replica": REPLICAS}, "vmap", (False,))
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
    group = js.ReplicaGroup("replica", without=(lambda name: name == "cut", 0))
    found = lift(lambda tree: group.block(tree), {"replica": REPLICAS}, "vmap", (False,))(STACKED)
    assert {name: x.shape[1:] for name, x in found.items()} == BLOCKS | {"cut": (8, 3)}


def test_replicas_agree_where_all_do():
    group = js.ReplicaGroup("replica")
    agree = jax.vmap(group.agree, axis_name="replica")
    assert agree(jnp.array([True, True])).tolist() == [True, True]
    assert agree(jnp.array([True, False])).tolist() == [False, False]


def test_sums_and_messages_of_trees():
    """A replica that none sends to receives zeros."""
    group = js.ReplicaGroup("replica", bucket_bytes=8)
    tree = {"a": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones((3, 2), "bfloat16")}
    over = lambda fn: jax.vmap(fn, axis_name="replica")(tree)  # noqa: E731
    for name, x in over(group.sum).items():
        np.testing.assert_array_equal(x, np.broadcast_to(tree[name].sum(0), x.shape))
    sent = over(lambda x: group.permute(x, [(0, 2), (2, 1)]))
    for name, x in sent.items():
        assert x.dtype == tree[name].dtype
        np.testing.assert_array_equal(x[1:], tree[name][np.array([2, 0])])
        assert not np.any(x[0])


def test_other_settings_of_a_group():
    group = js.ReplicaGroup(("a", "b"), "device", codec=js.codecs.int8())
    assert group.placed(None, P("x")).placed(None, P("y")).param_specs == P("x")
    other = group.over("a", codec=None)
    assert (other.axes, other.bound_axes, other.codec) == (("a",), ("a", "device"), None)
