"""Whose state this is: classes that transforms name, and those that are learned from a state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.transform import gradient_state, holds_state
from jaxslowmo.transform._spec import learn_state

PARAMS = {"w": np.ones(3, np.float32)}
BATCH = np.ones((4, 3), np.float32)
MESH = js.virtual_mesh({"replica": 2})


def transform_of(kind, **told) -> js.ParameterTransform:
    """A parameter transform of one's own, which exchanges nothing, with a state of this class."""

    def update(updates, state, params=None, **extra):
        return updates, state._replace(count=state.count + 1)

    def init(params):
        return kind(jnp.zeros([], jnp.int32))

    def never(t, skipped=0):
        return ()

    told = {"phase": never, "due": lambda t: False, "schedules": (), **told}
    return js.ParameterTransform(init, update, **told)


def own_class() -> type:
    """A new class: what is known of one stays known."""

    class OwnState(NamedTuple):
        count: jax.Array

    return OwnState


def step_of(optimizer, mode):
    return js.make_train_step(
        lambda params, batch: (params["w"] * batch).sum(),
        optimizer,
        sync=js.local_sgd("replica", sync_every=2),
        mesh=MESH,
        mode=mode,
    )


# Host-scheduled steps


@pytest.mark.parametrize("named", [True, False], ids=["named", "learned"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_transform_of_ones_own_is_refused_as_ours_are(named, wrapped):
    """Inside of `optimizer`, host-scheduled; no list holds its class."""
    kind = own_class()
    own = transform_of(kind, **({"state": kind} if named else {}))
    optimizer = optax.chain(optax.sgd(0.1), optax.masked(own, {"w": True}) if wrapped else own)
    with pytest.raises(ValueError, match=r'`mode`="host".*`optimizer` holds a parameter transform'):
        step_of(optimizer, "host").init(PARAMS)
    step = step_of(optimizer, "traced")
    step(step.init(PARAMS), BATCH)


def test_a_class_that_was_named_needs_no_state_to_be_known():
    """As where a state comes from a file, in a process that has made none."""
    named, learned = own_class(), own_class()
    transform_of(named, state=named)
    tx = transform_of(learned)
    assert holds_state(named(np.int32(0)), "parameters")
    assert not holds_state(learned(np.int32(0)), "parameters")
    jax.eval_shape(tx.init, PARAMS)
    assert holds_state(learned(np.int32(0)), "parameters")


def test_the_class_of_a_copy_with_another_init_is_known_too():
    before, named, learned = own_class(), own_class(), own_class()
    tx = transform_of(before, state=before)
    tx._replace(state=named)
    assert holds_state(named(np.int32(0)), "parameters")
    copied = tx._replace(init=lambda params: learned(jnp.zeros([], jnp.int32)))
    copied.init(PARAMS)
    assert holds_state(learned(np.int32(0)), "parameters")
    assert (tx.state, copied.state) == (before, None)


# What is learned, and what is not


class WithoutCounter(NamedTuple):
    total: np.ndarray


@pytest.mark.parametrize(
    "state",
    [
        optax.ScaleByScheduleState(np.int32(0)),
        optax.adam(0.1).init(PARAMS)[0],
        {"count": np.int32(0)},
        (np.int32(0),),
        WithoutCounter(np.zeros(2)),
    ],
    ids=["schedule", "adam", "dict", "tuple", "no counter"],
)
def test_classes_that_tell_nothing_are_not_learned(state):
    """Above all none of optax: its transforms would be taken for exchanges everywhere."""
    learn_state(state, needs_owner=False)
    assert not holds_state(state, "parameters")


def test_adam_around_which_a_transform_was_made_stays_an_optimizer():
    adam = optax.scale_by_adam()
    own = js.ParameterTransform(
        adam.init, adam.update, phase=lambda t, skipped=0: (), due=lambda t: False, schedules=()
    )
    own.init(PARAMS)
    step_of(optax.adam(0.1), "host").init(PARAMS)


def test_a_state_of_gradients_stays_one():
    """Also where a parameter transform was made of a gradient transform."""

    @gradient_state
    class Reduced(NamedTuple):
        count: np.ndarray

    state = Reduced(np.int32(0))
    transform_of(Reduced).init(PARAMS)
    assert holds_state(state, "gradients")
    assert not holds_state(state, "parameters")


# Whether a state may go elsewhere without its owner


def test_states_that_only_their_owner_can_move():
    for make in (js.diloco, js.local_sgd):  # a class is known from the first transform on
        make("replica")
    assert holds_state(js.LocalSGDState(np.int32(0)), "parameters")
    assert not holds_state(js.LocalSGDState(np.int32(0)), "parameters", needs_owner=True)
    slow = js.OuterState(np.int32(0), (), (), ())
    assert holds_state({"deep": [slow]}, "parameters", needs_owner=True)
    assert not holds_state(slow, "gradients")
    assert not holds_state(optax.adam(0.1).init(PARAMS), "parameters")


def test_a_class_that_some_owner_leaves_to_others_does_not_need_it():
    """`js.only_finite` has one state class, around slowmo and around local_sgd alike."""
    around = js.only_finite(js.local_sgd("replica")).init(PARAMS)
    assert not holds_state(around, "parameters", needs_owner=True)
    base = js.local_sgd("replica")
    slow = js.only_finite(js.slowmo("replica", base=base, sync_every=3, shard_state=False))
    slow = slow.init(PARAMS)
    assert type(slow) is type(around)
    assert holds_state(slow, "parameters", needs_owner=True)


def test_a_carry_of_ones_own_makes_its_owner_needed():
    kind = own_class()
    transform_of(kind, state=kind, carry=lambda state, params, old, new: state)
    assert holds_state(kind(np.int32(0)), "parameters", needs_owner=True)


def chain_of(name) -> optax.GradientTransformation:
    local = js.local_sgd("replica", sync_every=2)
    slow = js.slowmo("replica", base=local, sync_every=4)
    kind = own_class()
    return {
        "local_sgd": lambda: local,
        "guarded": lambda: js.only_finite(local),
        "own": lambda: transform_of(kind),
        "slowmo": lambda: slow,
        "guarded slowmo": lambda: js.only_finite(slow),
        "own carry": lambda: transform_of(kind, carry=lambda state, params, old, new: state),
    }[name]()


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("local_sgd", True),
        ("guarded", True),
        ("own", True),
        ("slowmo", False),
        ("guarded slowmo", False),
        ("own carry", False),
    ],
)
def test_a_chain_as_optimizer_moves_to_other_replicas_without_its_owner(name, moves, tmp_path):
    """Where its state is counters, and what may be averaged."""
    sync = chain_of(name)

    def step(replicas):
        return js.make_train_step(
            lambda params, batch: (params["w"] * batch).sum(),
            optax.chain(optax.sgd(0.1), sync),
            gradients=optax.identity(),
            mesh=js.virtual_mesh({"replica": replicas}),
        )

    state, _ = step(2)(step(2).init(PARAMS), BATCH)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        if moves:
            found = checkpoints.restore(step(4), PARAMS).state
            assert found.opt_state[1][-1].count.tolist() == [1] * 4
            step(4)(found, np.ones((4, 3), np.float32))
        else:
            with pytest.raises(CheckpointError, match=r"hold a parameter transform.*as `sync`"):
                checkpoints.restore(step(4), PARAMS)
