"""Which fields of optimizer states are copies of parameters, and how they are moved."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.transform import moved_copies, moving_states

contrib = optax.contrib
PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0]])}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
SHIFT = {"a": jnp.array([0.5, -1.0]), "b": jnp.array([[8.0]])}
HALF = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)


class Own(NamedTuple):
    start: Any
    origin: Any
    inner: Any = ()


def only(state, field):
    ((_, value),) = optax.tree.get_all_with_path(state, field)
    return value


def assert_moved(found, start, shift=SHIFT):
    for name in start:
        np.testing.assert_array_equal(found[name], start[name] + shift[name])


@pytest.mark.parametrize(
    ("optimizer", "field"),
    [
        (contrib.cocob(), "init_particles"),
        (contrib.scale_by_cocob(), "init_particles"),
        (contrib.madgrad(0.1), "x0"),
        (contrib.schedule_free_adamw(0.1), "z"),
        (contrib.sam(optax.adam(0.1), optax.sgd(0.1)), "cache"),
    ],
)
def test_copies_that_stand_for_the_parameters_move(optimizer, field):
    wrapped = optax.chain(
        optax.clip(1.0), optax.apply_if_finite(optax.MultiSteps(optimizer, 2), 2), optax.scale(1.0)
    )
    for tx in (optimizer, wrapped):
        state = tx.init(PARAMS)
        moved = moved_copies(state, PARAMS, ZEROS, SHIFT)
        assert_moved(only(moved, field), PARAMS)
        assert jax.tree.structure(moved) == jax.tree.structure(state)
        back = moved_copies(moved, PARAMS, SHIFT, ZEROS)
        jax.tree.map(np.testing.assert_array_equal, back, state)


@pytest.mark.parametrize(
    "optimizer",
    [contrib.dog(), contrib.dowg(), contrib.prodigy(), contrib.mechanize(optax.sgd(1.0))],
)
def test_points_to_measure_from_stay(optimizer):
    state = optimizer.init(PARAMS)
    assert moved_copies(state, PARAMS, ZEROS, SHIFT) is state
    assert not moving_states(state)


def test_each_group_of_a_partition_moves_by_its_own():
    tx = optax.partition(
        {"bet": contrib.cocob(), "free": contrib.schedule_free_sgd(0.1)}, {"a": "bet", "b": "free"}
    )
    moved = moved_copies(tx.init(PARAMS), PARAMS, ZEROS, SHIFT)
    assert_moved({"a": only(moved, "init_particles")["a"], "b": only(moved, "z")["b"]}, PARAMS)
    assert moving_states(moved) == ["COCOBState", "ScheduleFreeState"]


def test_copies_inside_of_what_has_copies():
    state = contrib.mechanize(contrib.madgrad(0.1)).init(PARAMS)
    moved = moved_copies(state, PARAMS, ZEROS, SHIFT)
    assert_moved(moved.base_optimizer_state[1].x0, PARAMS)
    assert_moved(moved.x0, PARAMS, ZEROS)
    both = contrib.sam(contrib.cocob(), optax.sgd(0.1)).init(PARAMS)
    moved = moved_copies(both, PARAMS, ZEROS, SHIFT)
    assert_moved(only(moved, "init_particles"), PARAMS)
    assert_moved(moved.cache, PARAMS)


def test_the_move_is_what_the_parameters_hold_afterwards():
    """Updates of half precision are float32, and parameters round them."""
    state = contrib.schedule_free_sgd(0.1, state_dtype=jnp.float32).init(HALF)
    updates = jax.tree.map(lambda x: jnp.full(x.shape, 1 / 3, jnp.float32), HALF)
    moved = moved_copies(state, HALF, jax.tree.map(jnp.zeros_like, updates), updates)
    now = optax.apply_updates(HALF, updates)
    for name, z in moved.z.items():
        assert z.dtype == jnp.float32
        np.testing.assert_array_equal(z, now[name].astype(jnp.float32))
    same = contrib.cocob().init(HALF)
    kept = only(moved_copies(same, HALF, updates, updates), "init_particles")
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(kept))


def test_what_is_not_finite_moves_nothing():
    nan = {**SHIFT, "a": jnp.array([jnp.nan, 1.0])}
    moved = only(moved_copies(contrib.cocob().init(PARAMS), PARAMS, ZEROS, nan), "init_particles")
    assert_moved(moved, PARAMS, {"a": jnp.array([0.0, 1.0]), "b": SHIFT["b"]})
    both = only(moved_copies(contrib.cocob().init(PARAMS), PARAMS, nan, nan), "init_particles")
    assert_moved(both, PARAMS, ZEROS)


def test_nothing_is_computed_for_optimizers_without_copies():
    state = optax.adam(0.1).init(PARAMS)
    assert moved_copies(state, None, None, None) is state


def test_copies_in_another_form_are_refused():
    state = optax.flatten(contrib.cocob()).init(PARAMS)
    with pytest.raises(ValueError, match=r"COCOBState.init_particles.*optax\.flatten"):
        moved_copies(state, PARAMS, ZEROS, SHIFT)


def test_a_state_of_ones_own():
    state = Own(PARAMS, PARAMS, contrib.cocob().init(PARAMS))
    assert_moved(only(moved_copies(state, PARAMS, ZEROS, SHIFT), "init_particles"), PARAMS)
    assert_moved(moved_copies(state, PARAMS, ZEROS, SHIFT).start, PARAMS, ZEROS)
    js.remembers_parameters(Own, moves=("start",), stays=("origin",))
    moved = moved_copies(state, PARAMS, ZEROS, SHIFT)
    assert_moved(moved.start, PARAMS)
    assert_moved(moved.origin, PARAMS, ZEROS)
    assert_moved(only(moved.inner, "init_particles"), PARAMS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((dict,), r"`kind` must be a NamedTuple, got <class 'dict'>"),
        ((Own, ("begin",)), r"fields of Own, \['start', 'origin', 'inner'\].*moves=\('begin',\)"),
        ((Own, ("start",), ("start",)), r"each once; got moves=\('start',\), stays=\('start',\)"),
    ],
)
def test_errors(arguments, said):
    kind, *fields = arguments
    with pytest.raises(ValueError, match=said):
        js.remembers_parameters(kind, **dict(zip(("moves", "stays"), fields, strict=False)))
