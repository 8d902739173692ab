"""Which optimizers run on the buffers of all stages: those that treat all elements alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.tree import Staged
from support.layered import language_model
from support.promotion import promoting


def by_size(tree):
    """Return a mask that says the same of all leaves, and another thing of a buffer of them."""
    return jax.tree.map(lambda x: x.size < 100, tree)


def centred(updates, state, params=None):
    return jax.tree.map(lambda x: x - jnp.mean(x), updates), state


ALIKE = {
    "adamw": promoting(optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1)),
    "half": promoting(optax.adam(0.1, mu_dtype=jnp.bfloat16)),
    "several": promoting(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "masked_nothing": optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: True, tree)),
}
UNLIKE = {
    "by_rank": optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "by_size": optax.adamw(0.1, mask=by_size),
    "mean": optax.GradientTransformation(lambda params: optax.EmptyState(), centred),
}


@pytest.fixture(scope="module")
def layout(mesh_of):
    model, params = language_model(4)
    mesh = mesh_of({"stage": 2})
    return js.pipelined(model, params, js.schedules.gpipe(2, 2), mesh=mesh).layout


@pytest.mark.parametrize("name", [*ALIKE, *UNLIKE])
def test_a_branch_per_stage_stands_only_around_the_others(layout, name):
    tx, types = js.chain({**ALIKE, **UNLIKE}[name]), layout.types
    state = jax.eval_shape(tx.init, types)
    program = str(jax.make_jaxpr(tx.update)(types, state, types))
    assert ("shard_map[" in program) == (name in UNLIKE)


def test_states_are_as_those_that_are_made_per_stage(layout):
    """So that a run goes on with another mask, and a checkpoint is read by the same names."""
    stacked = layout.stack(language_model(4)[1])
    alike = ALIKE["schedule_free"]
    own = jax.jit(js.chain(alike).init)(stacked)
    of_stages = optax.chain(alike, UNLIKE["mean"])
    other = jax.jit(js.chain(of_stages).init)(stacked)[0][0]
    assert jax.tree.structure(own[0]) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, float), np.asarray(y, float))
    # Moments lie on their stages, in a loop of one's own, too.
    for state in (own, js.chain(alike).init(stacked)):
        nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Staged))
        moments = [x["float32"] for x in nodes if isinstance(x, Staged) and "float32" in x]
        for x in moments:
            assert x.sharding.is_equivalent_to(stacked["float32"].sharding, 2)
        assert moments
