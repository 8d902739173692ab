"""Transforms of three kinds, and chains of them: on stages as without, or refused.

What treats elements alike runs on the buffers, what takes its own leaf in a branch per stage.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxslowmo as js
from jaxslowmo.transform import takes_extra
from support.promotion import promoting

SHAPES = {"b": (4,), "head": (3, 3), "w": (5, 3)}
UPDATES = 3
DRAW = np.random.default_rng(0).normal
TREES = [
    [{name: np.float32(DRAW(size=shape))} for name, shape in SHAPES.items()]
    for _ in range(UPDATES + 1)
]


def no_bias(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "b", tree)


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def of_leaves(update):
    return optax.stateless(lambda updates, params: update(updates))


def every(update):
    return of_leaves(lambda tree: jax.tree.map(update, tree))


ELEMENTS = {
    "adamw": promoting(optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1)),
    "several": promoting(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "schedule free": optax.contrib.schedule_free_sgd(0.1),
    "plateau": promoting(optax.contrib.reduce_on_plateau()),  # needs the loss
    "outer nesterov": js.algorithms.outer_nesterov(),
    "remat": every(jax.checkpoint(jnp.sin)),
}
LEAVES = {
    "mask by name": optax.adamw(0.1, weight_decay=0.5, mask=no_bias),
    "muon": optax.contrib.muon(0.1, ns_steps=1),
    "mean": every(lambda x: x - jnp.mean(x)),
    "adafactor of a mask": optax.masked(optax.adafactor(0.1, min_dim_size_to_factor=2), is_matrix),
}
MIXING = {
    "global norm": optax.clip_by_global_norm(1e-3),
    "polyak": optax.polyak_sgd(),  # needs the loss
    "flatten": optax.flatten(optax.adam(0.1)),  # does not, but joins them
    "needs more": optax.GradientTransformationExtraArgs(
        lambda params: (), lambda updates, state, params=None, *, curvature: (updates, state)
    ),
}
ALL = {**ELEMENTS, **LEAVES, **MIXING}


@functools.cache
def layout():
    """Three layers of one leaf each on two stages."""
    return layout_of(TREES[0], [[(0, 1)], [(1, 3)]])


def layout_of(params, parts):
    model = js.LayeredModel([lambda p, x: x] * len(params), lambda x, batch: jnp.mean(x))
    mesh = js.make_mesh({"stage": len(parts)}, devices=jax.devices()[: len(parts)])
    schedule = js.schedules.gpipe(len(parts), 2)
    return js.pipelined(model, params, schedule, mesh=mesh, parts=parts).layout


def kind_of(tx):
    """Return how a transform runs on stages."""
    tx, types = js.chain(tx), layout().types
    try:
        state = jax.eval_shape(tx.init, types)
    except ValueError as error:
        return "refused" if "depends on leaves of other stages" in str(error) else error
    value = jax.ShapeDtypeStruct((), jnp.float32)
    more = {"value": value} if takes_extra(state) else {}
    program = str(jax.make_jaxpr(tx.update)(types, state, types, **more))
    return "per stage" if "shard_map[" in program else "on buffers"


def trained(tx, formed):
    """Return the parameters after updates, with trees in the form that `formed` gives them."""
    params, *grads = map(formed, TREES)
    state = tx.init(params)
    for each in grads:
        updates, state = jax.jit(tx.update)(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


def check_equal(tx):
    found = layout().unstack(trained(js.chain(tx), layout().stack))
    known = trained(optax.with_extra_args_support(tx), lambda tree: tree)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, known)


@pytest.mark.parametrize("name", ALL)
def test_it_runs_in_its_way_and_equals_itself_without_stages(name):
    kind = {**dict.fromkeys(ELEMENTS, "on buffers"), **dict.fromkeys(LEAVES, "per stage")}
    assert kind_of(ALL[name]) == kind.get(name, "refused")
    if name not in MIXING and name != "plateau":
        check_equal(ALL[name])


ALIKE = [DRAW(size=(4, 3)).astype(np.float32) for _ in range(4)]


def updated(fn, stages):
    """Return the updates of `fn` for leaves that are alike, on stages of equally many."""
    size = len(ALIKE) // stages
    laid_out = layout_of(ALIKE, [[(i * size, (i + 1) * size)] for i in range(stages)])
    tx, stacked = js.chain(of_leaves(fn)), laid_out.stack(ALIKE)
    return laid_out.unstack(jax.jit(tx.update)(stacked, tx.init(stacked), stacked)[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [leaf * x[0] for leaf in x],
        lambda x: [lax.cond(x[0][0, 0] > 0, lambda y=y: y, lambda y=y: -y) for y in x],
    ],
)
def test_other_leaves_of_the_same_shape_are_not_the_own_one(fn):
    jax.tree.map(np.testing.assert_array_equal, updated(fn, 1), fn(ALIKE))
    with pytest.raises(ValueError, match="leaves of other stages"):
        updated(fn, 2)
