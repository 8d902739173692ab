"""Parameter transforms: optax's pair of an algorithm, and what follows from its list of events."""

import copy
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.transforms import TRANSFORMS

REPLICAS = 2
ONE = {"w": jnp.ones(1)}


class NotesState(NamedTuple):
    count: jax.Array
    notes: jax.Array  # the digits of the events that ran, and 9 for an update without any


@dataclass(frozen=True)
class Notes(js.spec.Sync):
    """Events that write down that they ran; `told` are their schedules, and what they replace."""

    told: tuple[tuple[js.spec.Every, bool], ...]
    owner = "notes"
    state = NotesState
    axes = ("replica",)

    def init(self, params):
        return NotesState(jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))

    def local(self, operand, now):
        return noted(9, super().local(operand, now))

    def events(self):
        return [
            js.spec.Event(str(i), due, lambda o, now, i=i: noted(i, o), replaces)
            for i, (due, replaces) in enumerate(self.told, start=1)
        ]


def noted(digit, operand):
    updates, others, state = operand
    return updates, others, state._replace(notes=10 * state.notes + digit)


def notes(tx, t, **options):
    """What update `t` notes."""

    def one(x):
        state = tx.init(x)._replace(count=jnp.int32(t - 1))
        return tx.update(x, state, x, **options)[1].notes

    return str(jax.vmap(one, axis_name="replica")(jnp.ones(REPLICAS))[0])


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4), st.data())
def test_phases_and_programs_follow_from_the_events(told, data):
    """In order; what replaces leaves out all before it, and else `local` comes first."""
    tx = js.ParameterTransform(Notes(tuple((js.every(k), r) for k, r in told)))
    t = data.draw(st.integers(1, 12))
    wanted = ["9"]
    for i, (k, replaces) in enumerate(told, start=1):
        if t % k == 0:
            wanted = [str(i)] if replaces else [*wanted, str(i)]
    phase = tuple(x for x in wanted if x != "9")
    assert (tx.phase(t), bool(tx.due(t))) == (phase, bool(phase))
    assert notes(tx, t) == notes(tx, t, phase=phase) == "".join(wanted)
    for never in (False, jnp.bool_(False)):
        assert notes(tx, t, communicate=never) == "9"
    assert set(tx.phases()) == {tx.phase(t) for t in range(1, 13)}


def test_a_local_update_passes_one_conditional():
    """However many events there are; one of every update stands in none."""
    conds = []
    for told in ([(3, False), (4, False), (5, True)], [(1, True)]):
        tx = js.ParameterTransform(Notes(tuple((js.every(k), r) for k, r in told)))
        jaxpr = jax.make_jaxpr(
            jax.vmap(lambda x, tx=tx: tx.update(x, tx.init(x), x), axis_name="replica")
        )
        conds.append(sum(eqn.primitive.name == "cond" for eqn in jaxpr(jnp.ones(2)).eqns))
    assert conds == [1, 0]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_are_whole(make):
    tx = TRANSFORMS["slowmo over sgp"]()
    twin = make(tx)
    assert (*twin,) == (*tx,) == (tx.init, tx.update)
    assert (twin.sync, twin.phases(), twin.axes) == (tx.sync, tx.phases(), ("replica",))


def test_another_update_is_another_transform():
    """A step would go past it otherwise, by `exchange`."""
    tx = js.local_sgd("replica")
    other = tx._replace(update=optax.identity().update)
    assert not isinstance(other, js.ParameterTransform)
    assert isinstance(other, optax.GradientTransformationExtraArgs)


def test_what_the_algorithm_does_not_say_has_a_default():
    tx = js.ParameterTransform(Notes(()))
    state, y = tx.init(ONE), {"w": 2.0}
    assert (tx.numerator(state, y), tx.reset(state), tx.shares(state)) == (
        (y, None),
        state,
        [(1.0, None)],
    )
    assert tx.permit(state, y, [], ("replica",)) == (True, state)
    assert (tx.has_anchor, tx.beside, tx.shards(state), tx.phases()) == (False, None, [], [()])
    assert tx.sized({}).sync is tx.with_specs(P()).sync is tx.sync


def test_phases_are_found_from_the_schedules_and_have_names():
    # Of several the longest is not needed in full: of these it would be 10^18 updates.
    rare = [(js.every(10**9 - 1), False), (js.every(10**9), True)]
    both = js.ParameterTransform(Notes(tuple(rare)))
    assert set(both.phases()) >= {(), ("1",), ("2",)}
    assert [js.phase_name(phase) for phase in (("average", "slow"), ())] == [
        "average+slow",
        "local",
    ]


class AroundState(NamedTuple):
    count: jax.Array
    inner: object


@dataclass(frozen=True)
class Around(js.spec.Wrapper):
    """A wrapper that changes nothing."""

    base: js.spec.Sync
    owner = "around"
    state = AroundState

    def init(self, params):
        return AroundState(jnp.zeros([], jnp.int32), self.base.init(params))


def ends_of(tx, mesh, steps=8, **options):
    loss = lambda p, b: jnp.mean((b @ p["w"] - 1) ** 2)  # noqa: E731
    step = js.make_train_step(loss, optax.sgd(0.1), sync=tx, mesh=mesh, **options)
    state = step.init({"w": np.float32([1, -2, 3])})
    for batch in np.random.default_rng(0).normal(size=(steps, 4, 3)):
        state, _ = step(state, np.float32(batch))
    anchor = tx.sync.has_anchor and js.algorithms.read_anchor(
        step.sync, state.opt_state[-1], state.params, mesh=mesh
    )
    return step.consensus(state), step.shares(state), anchor


@pytest.mark.parametrize(
    "name", ["local_sgd", "sgp", "slowmo", "slowmo over sgp", "slowmo inexact", "diloco"]
)
@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_wrapper_is_as_what_it_wraps(name, mode):
    mesh = js.virtual_mesh({"replica": 4})
    tx = TRANSFORMS[name]()
    wrapped = js.ParameterTransform(Around(tx.sync))
    assert (wrapped.phases(), wrapped.axes) == (tx.phases(), tx.axes)
    for a, b in itertools.zip_longest(
        *(jax.tree.leaves(ends_of(x, mesh, mode=mode)) for x in (tx, wrapped))
    ):
        np.testing.assert_array_equal(a, b)


def test_a_wrapper_has_the_rounds_and_schedules_of_what_it_wraps():
    """A skipped exchange does not rotate the graph; fragments share one period."""
    sgp = js.ParameterTransform(Around(TRANSFORMS["sgp"]().sync))
    x = jnp.ones(4)
    skip = lambda x: sgp.update(x, sgp.init(x), x, communicate=False)[1]  # noqa: E731
    state = jax.tree.map(lambda x: x[0], jax.vmap(skip, axis_name="replica")(x))
    assert sgp.phase(2, sgp.skipped(state)) == ("round 0",)
    many = js.diloco("replica", sync_every=96, fragments=8)
    assert js.ParameterTransform(Around(many.sync)).schedules == many.schedules


@pytest.mark.parametrize("around", [lambda tx: tx, js.only_finite])
def test_an_event_may_return_updates_in_half_precision(around):
    """As it was given them, if it replaces what is before it; local updates are in float32."""
    tx = around(js.ParameterTransform(Notes(((js.every(2), True),))))
    x = jnp.ones(2, jnp.bfloat16)
    update = jax.vmap(lambda x: tx.update(x, tx.init(x), x)[0], axis_name="replica")
    assert update(x).dtype == jnp.float32
