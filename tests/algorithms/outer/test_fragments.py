"""Fragments: how a model is divided."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.algorithms.outer._fragments import make_fragments


def anchors_of(params, **options) -> list[list]:
    """Return the shapes of the leaves of each fragment."""
    tx = js.diloco("replica", sync_every=60, shard_state=False, **options)
    parts = [x.select(params) for x in make_fragments("diloco", options["fragments"], params)]
    assert len(tx.phases()) == len(parts) + 1
    return [[x.shape for x in jax.tree.leaves(part)] for part in parts]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.sampled_from([2, 3, 4]))
def test_the_largest_fragment_is_as_small_as_runs_of_leaves_allow(sizes, count):
    """Against all divisions; the leaves are layers of their own."""
    count = min(count, len(sizes))
    params = {f"layer{i}": {"w": np.ones(size, np.float32)} for i, size in enumerate(sizes)}
    found = [[size for (size,) in part] for part in anchors_of(params, fragments=count)]
    assert [size for part in found for size in part] == sizes
    assert all(found)
    divisions = itertools.combinations(range(1, len(sizes)), count - 1)
    ends = ([0, *cuts, len(sizes)] for cuts in divisions)
    least = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(e)) for e in ends)
    assert max(map(sum, found)) == least


def test_layers_stay_whole_where_there_are_enough():
    layers = {f"block{i}": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)} for i in range(4)}
    assert anchors_of(layers, fragments=2) == [[(4,), (4, 4)] * 2] * 2
    deep = {"layers": {str(i): {"mlp": {"w": jnp.ones(9)}, "norm": jnp.ones(1)} for i in range(2)}}
    assert anchors_of(deep, fragments=2) == [[(9,), (1,)]] * 2
    one = {"block": {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(6, jnp.bfloat16)}}
    assert anchors_of(one, fragments=3) == [[(3,)], [(3,)], [(6,)]]
