"""Which optimizers work on the buffers of all stages: those that treat all elements alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.model._elementwise import is_elementwise
from jaxslowmo.tree import Staged
from support.layered import language_model
from support.optimizers import is_no_bias

_, PARAMS = language_model(4)


def by_size(tree):
    """A mask that says the same of all leaves, and another thing of a buffer of them."""
    return jax.tree.map(lambda x: x.size < 100, tree)


def centred(updates, state, params=None):
    return jax.tree.map(lambda x: x - jnp.mean(x), updates), state


ALIKE = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "half": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "lion": optax.lion(0.1),
    "masked_nothing": optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: True, tree)),
}
UNLIKE = {
    "by_rank": optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "by_name": optax.adamw(0.1, mask=is_no_bias),
    "by_size": optax.adamw(0.1, mask=by_size),
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "conditional": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "mean": optax.GradientTransformation(lambda params: optax.EmptyState(), centred),
    "value": optax.contrib.reduce_on_plateau(),
}


def packing_of(mesh_of):
    model, _ = language_model(4)
    schedule = js.schedules.gpipe(2, 2)
    return js.pipelined(model, PARAMS, schedule, mesh=mesh_of({"stage": 2})).layout


@pytest.mark.parametrize("name", [*ALIKE, *UNLIKE])
def test_programs_tell(mesh_of, name):
    tx = optax.with_extra_args_support({**ALIKE, **UNLIKE}[name])
    assert is_elementwise(packing_of(mesh_of).packing, tx) == (name in ALIKE)


@pytest.mark.parametrize("name", ["adam", "half", "schedule_free"])
def test_states_are_as_those_that_are_made_per_stage(mesh_of, name):
    """So that a run goes on with another mask, and a checkpoint is read by the same names."""
    layout = packing_of(mesh_of)
    stacked = layout.stack(PARAMS)
    own = jax.jit(js.chain(ALIKE[name]).init)(stacked)
    of_stages = optax.chain(ALIKE[name], UNLIKE["mean"])
    other = jax.jit(js.chain(of_stages).init)(stacked)[0][0]
    assert jax.tree.structure(own[0]) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, float), np.asarray(y, float))
    nodes = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, Staged))
    assert any(isinstance(x, Staged) for x in nodes)


def test_moments_lie_on_their_stages_in_a_loop_of_ones_own(mesh_of):
    layout = packing_of(mesh_of)
    stacked = layout.stack(PARAMS)
    for init in (js.chain(ALIKE["adam"]).init, jax.jit(js.chain(ALIKE["adam"]).init)):
        mu = init(stacked)[0][0].mu["float32"]
        assert mu.sharding.is_equivalent_to(stacked["float32"].sharding, 2)


def test_no_branch_stands_around_them(mesh_of):
    stacked = packing_of(mesh_of).stack(PARAMS)
    tx = js.chain(ALIKE["adamw"])
    text = jax.jit(tx.update).lower(stacked, tx.init(stacked), stacked).as_text()
    assert "case" not in text
