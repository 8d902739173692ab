"""Shards of an anchor on the host: joined, split, and as the devices lay them out."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.algorithms.outer._anchor import ShardedAnchor
from jaxslowmo.transform import Exchange, StatePlacement


def numbered(shapes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"p{i}": rng.normal(size=shape).astype(np.float32 if i % 3 else np.float64)
        for i, shape in enumerate(shapes)
    }


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=4),
    replicas=st.integers(1, 9),
    local=st.integers(1, 3),
    bucket_bytes=st.sampled_from([None, 0, 100]),
)
def test_split_and_joined_is_the_same_tree(shapes, replicas, local, bucket_bytes):
    tree = numbered(shapes)
    shards = ShardedAnchor(Exchange("replica", "device", None, bucket_bytes))
    at = StatePlacement(replicas, {"replica": replicas, "device": local})
    split = shards.split(tree, tree, at)
    assert all(x.shape[0] == replicas and x.ndim == 3 for x in split)
    joined = shards.join(split, tree, at)
    jax.tree.map(np.testing.assert_array_equal, joined, tree)
    if split:
        with pytest.raises(ValueError, match="shards"):
            shards.join(split[1:], tree, at)


def test_shards_of_another_size_are_refused():
    tree = numbered([(40,)])
    shards = ShardedAnchor(Exchange("replica"))
    with pytest.raises(
        ValueError, match=r"shards of \[\(4, 10, 1\)\], and not of \[\(3, 14, 1\)\]"
    ):
        shards.join(
            shards.split(tree, tree, StatePlacement(4, {"replica": 4})),
            tree,
            StatePlacement(3, {"replica": 3}),
        )


@pytest.mark.parametrize("local", [None, "device"])
def test_devices_lay_them_out_likewise(local, mesh_of):
    """Leaves sharded over an automatic axis have blocks of their own."""
    mesh = mesh_of({"replica": 2, "device": 2, "model": 2})
    params = {k: x.astype(np.float32) for k, x in numbered([(6, 4), (4, 2, 3), (5,)]).items()}
    specs = {"p0": P(None, "model"), "p1": P("model"), "p2": P()}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    sync = js.diloco(
        "replica",
        sync_every=2,
        outer_optimizer=optax.sgd(1.0),
        local_axis_name=local,
        param_specs=specs,
    )
    stacked = js.replicate(placed, mesh=mesh)
    anchor = js.init(sync, stacked, mesh=mesh).anchor
    at = StatePlacement(2, dict(mesh.shape), frozenset({"model"}))
    split = ShardedAnchor(Exchange("replica", local, specs)).split(params, params, at)
    assert len(split) == len(anchor) == 2  # leaves over "model", and the others
    for a, b in zip(split, anchor, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    joined = ShardedAnchor(Exchange("replica", local, specs)).join(split, params, at)
    jax.tree.map(np.testing.assert_array_equal, joined, params)
