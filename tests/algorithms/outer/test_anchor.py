"""Anchors of which each replica keeps a part: how much that is, and what it is of."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxslowmo as js
from jaxslowmo.algorithms.outer._anchor import ShardedAnchor
from jaxslowmo.transform import Exchange
from jaxslowmo.tree import tree_bytes

SHAPES = st.lists(
    st.lists(st.integers(0, 300), max_size=2).map(tuple), min_size=1, max_size=4
).filter(lambda shapes: sum(math.prod(s) for s in shapes) > 0)
REPLICAS = st.sampled_from([1, 2, 4, 8, 33])
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])


@pytest.mark.filterwarnings("ignore:.*has size 1")
@settings(max_examples=60)
@given(shapes=SHAPES, replicas=REPLICAS, dtype=DTYPES)
def test_state_of_sharded_slow_momentum_is_two_parts_of_the_parameters(shapes, replicas, dtype):
    """Per replica <= 2 N / replicas + 1 % + 64 KiB, N the float32 bytes: shapes only."""
    scale = 200 if len(shapes) == 1 else 1  # some trees of up to 18 million parameters
    params = {
        f"p{i}": jax.ShapeDtypeStruct((scale, *shape), dtype) for i, shape in enumerate(shapes)
    }
    slowmo = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6)
    state = jax.eval_shape(
        jax.vmap(slowmo.init, axis_name="replica", in_axes=None, axis_size=replicas), params
    )
    per_replica = tree_bytes(state) / replicas
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert per_replica <= 2 * whole / replicas * 1.01 + 64 * 1024
    assert per_replica >= 2 * whole / replicas


@pytest.mark.parametrize("local", [None, "device"])
@pytest.mark.parametrize("bucket_bytes", [None, 16])
def test_stored_and_restored_is_the_same_tree_in_float32(local, bucket_bytes):
    """And the average in its form is the mean of the replicas."""
    anchor = ShardedAnchor(Exchange("replica", local, None, bucket_bytes))
    rng = np.random.default_rng(0)
    tree = {"half": rng.normal(size=(4, 5)).astype(jnp.bfloat16), "w": rng.normal(size=(4, 3, 2))}
    tree["w"] = tree["w"].astype(np.float32)

    def one(tree):
        alike = jax.tree.map(lambda x: jax.lax.all_gather(x, "replica")[2], tree)
        stored, zeros = anchor.store(alike), anchor.like_stored(alike)
        assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, zeros)
        average = anchor.restore(anchor.average(tree), tree)
        return anchor.restore(stored, tree), average

    if local is not None:
        one = jax.vmap(one, axis_name=local, axis_size=2, in_axes=None, out_axes=None)
    back, average = jax.vmap(one, axis_name="replica")(tree)
    for name, x in tree.items():
        wide = np.asarray(x, np.float32)
        assert back[name].dtype == average[name].dtype == jnp.float32
        np.testing.assert_array_equal(back[name], np.broadcast_to(wide[2], wide.shape))
        mean = np.broadcast_to(wide.mean(0), wide.shape)
        np.testing.assert_allclose(average[name], mean, rtol=1e-5, atol=1e-6)
