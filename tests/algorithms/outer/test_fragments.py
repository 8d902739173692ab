"""Fragments: what of a model is one, also of a pipeline."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.algorithms.outer._fragments import make_fragments
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.tree import Staged
from support.layered import language_model, tokens


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


def pipeline(**options):
    """Return a training step over stages, and its parameters."""
    model, params = language_model(2)
    mesh = js.make_mesh({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, js.schedules.one_f_one_b(2, 2), mesh=mesh)
    sync = js.diloco("replica", sync_every=6, **options)
    return js.make_train_step(pipe, optax.sgd(0.1), sync=sync, mesh=mesh, mode="host"), params


def test_a_pipeline_goes_on_in_other_fragments(tmp_path):
    (step, params), (other, _) = pipeline(fragments=2, delay=1), pipeline(fragments=3)
    state = step.init(params)
    for i in range(2):
        state, _ = step(state, tokens(16, seed=i))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, wait=True)
        resumed = checkpoints.restore(other, params).state
    anchors = [x.exchange.shared["anchor"] for x in (state, resumed)]
    jax.tree.map(np.testing.assert_array_equal, *anchors)
    other(resumed, tokens(16))


def test_stages_must_be_cut_in_parts():
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))
    step, params = pipeline(fragments=2, shard_state=False, outer_optimizer=mixing)
    with pytest.raises(ValueError, match="`outer_optimizer` must be element-wise"):
        step.init(params)
    few = Staged({"float32": jnp.ones((2, 3))}, "no layout of a model")
    with pytest.raises(ValueError, match=r"`fragments`.*4 for 3"):
        js.local_sgd("replica", sync_every=12, fragments=4).init(few)
