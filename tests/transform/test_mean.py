"""The mean of the replicas through flat buffers: its weights, its dtypes, its slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxslowmo.transform import Exchange, replica_mean

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


@settings(max_examples=10)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=2).map(tuple), max_size=4),
    weights=st.none() | st.lists(st.integers(0, 3), min_size=REPLICAS, max_size=REPLICAS),
    bucket_bytes=st.sampled_from([None, 0, 40]),
)
def test_as_numpy_says(shapes, weights, bucket_bytes):
    rng = np.random.default_rng(0)
    tree = [rng.normal(size=(REPLICAS, *shape)).astype(np.float32) for shape in shapes]
    for found, x in zip(meant(tree, weights, None, bucket_bytes), tree, strict=True):
        share = np.ones(REPLICAS) if weights is None else np.asarray(weights, float)
        wanted = x  # where nobody weighs anything
        if share.any():
            wanted = np.broadcast_to(np.tensordot(share / share.sum(), x, 1), x.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_leaves_keep_their_dtypes():
    tree = {
        name: jnp.full((REPLICAS, 3), value, name)
        for name, value in {"float32": 0.1, "bfloat16": 1, "float16": 2}.items()
    }
    found = meant(tree)
    assert {name: x.dtype.name for name, x in found.items()} == {name: name for name in tree}
    jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.parametrize("local", [None, "device"])
def test_float16_does_not_overflow_where_one_replica_weighs_most(local):
    """Large values, and a weight four times the mean: the product alone would not fit."""
    found = meant(np.full((REPLICAS, 6), 30000, np.float16), [1, 0, 0, 0], local)
    np.testing.assert_allclose(np.asarray(found, np.float32), 30000, rtol=1e-3)
