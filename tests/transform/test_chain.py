"""Chains, the states that they make, and copies of the parameters that follow exchanges."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import move_copies
from support.meshes import MESHES

contrib = optax.contrib
START = {"w": np.array([1.0, -2.0], np.float32)}
MESH = js.virtual_mesh({"replica": 2})
SYNC = js.local_sgd("replica", sync_every=2)


def test_an_optimizer_that_takes_exchanges_back_is_told_of():
    """A loop of one's own cannot reach into its state; `js.chain` can."""
    parts = optax.apply_if_finite(contrib.cocob(), 3), SYNC
    stacked, ours = js.replicate(START, mesh=MESH), js.chain(*parts)
    # In the second one only the copies of the chain inside follow.
    for tx in (optax.chain(*parts), optax.chain(parts[0], ours)):
        with pytest.warns(UserWarning, match=r"\(COCOBState\).*js\.chain"):
            js.init(tx, stacked, mesh=MESH)
    wrapped = optax.masked(ours, True), optax.chain(optax.clip(1.0), ours)
    for silent in (ours, *wrapped, parts[0], optax.chain(contrib.dog(), SYNC)):
        js.init(silent, stacked, mesh=MESH)  # warnings are errors


# Which fields are copies, and how they are moved

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0]])}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
SHIFT = {"a": jnp.array([0.5, -1.0]), "b": jnp.array([[8.0]])}
MOVED = jax.tree.map(jnp.add, PARAMS, SHIFT)


class Own(NamedTuple):
    start: Any
    origin: Any
    inner: Any


def only(state, field):
    ((_, value),) = optax.tree.get_all_with_path(state, field)
    return value


def assert_moved(found, start, shift=SHIFT):
    for name in start:
        np.testing.assert_array_equal(found[name], start[name] + shift[name])


def test_copies_of_ones_own_move_once_they_are_told_and_so_do_those_inside():
    own = Own(PARAMS, PARAMS, contrib.mechanize(contrib.madgrad(0.1)).init(PARAMS))
    assert_moved(move_copies(own, PARAMS, MOVED).start, PARAMS, ZEROS)
    js.spec.remembers_parameters(Own, moves=("start",), stays=("origin",))
    moved = move_copies(own, PARAMS, MOVED)
    assert_moved(moved.start, PARAMS)
    assert_moved(moved.origin, PARAMS, ZEROS)
    assert_moved(moved.inner.base_optimizer_state[1].x0, PARAMS)
    assert_moved(moved.inner.x0, PARAMS, ZEROS)


def test_what_is_not_finite_or_no_tree_of_parameters_is_not_moved():
    nan = {**MOVED, "a": jnp.array([jnp.nan, 3.0])}
    moved = only(move_copies(contrib.cocob().init(PARAMS), PARAMS, nan), "init_particles")
    assert_moved(moved, PARAMS, {"a": jnp.array([0.0, 1.0]), "b": SHIFT["b"]})
    flat = optax.flatten(contrib.cocob()).init(PARAMS)
    with pytest.raises(ValueError, match=r"COCOBState.init_particles.*optax\.flatten"):
        move_copies(flat, PARAMS, MOVED)


# States


@pytest.mark.parametrize("kind", ["explicit", "virtual"])
def test_states_are_stacked_and_outlive_the_parameters(kind):
    """Also where the same array stands in parameters and state: they are donated."""
    mesh = MESHES[kind]({"replica": 4})
    base = js.local_sgd("replica")
    slow = js.slowmo("replica", base=base, sync_every=3, shard_state=False)
    stacked = js.replicate({"w": np.ones((3, 2), np.float32)}, mesh=mesh)
    state = js.init(optax.chain(optax.trace(0.9), slow), stacked, mesh=mesh)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(stacked)
    assert stacked["w"].is_deleted()
    for leaf in jax.tree.leaves(state):
        assert leaf.shape[0] == 4
        if kind != "virtual":
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), leaf.ndim)
    assert np.array_equal(state[-1].shared["anchor"]["w"], np.ones((4, 3, 2)))
    # Parameters that were not placed are; and an `init` may be a bound method.
    steps = optax.MultiSteps(optax.sgd(0.1), 2)
    assert js.init(steps, {"w": np.ones((4, 3))}, mesh=mesh).mini_step.shape == (4,)
