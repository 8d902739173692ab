"""Parameter transforms are tuples with more beside them: copies and changes reach all of it."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.transforms import PARAMETER, TRANSFORMS


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda tx: tx._replace()])
@pytest.mark.parametrize("name", PARAMETER)
def test_copies_are_whole(name, make):
    tx = TRANSFORMS[name]()
    twin = make(tx)
    assert type(twin) is type(tx)
    assert vars(twin).keys() == vars(tx).keys()
    assert twin.phases() == tx.phases()
    assert twin.axes == tx.axes == ("replica",)
    assert (twin.init, twin.update) == (tx.init, tx.update)


def test_a_copy_with_another_update_uses_it():
    def twice(updates, state, params=None, **extra):
        return jax.tree.map(lambda u: 2 * u, updates), state

    tx = js.local_sgd("replica")._replace(update=twice)
    updates, others, _ = tx.exchange({"w": 1.0}, [], tx.init({"w": jnp.ones(1)}), {"w": 1.0})
    assert (updates, others) == ({"w": 2.0}, [])
    assert tx.sized({"replica": 2}).update is tx.with_specs({"w": P()}).update is twice
    with pytest.raises(ValueError, match=r"`exchange` to average model state.*\"local\""):
        tx.exchange({"w": 1.0}, [jnp.ones(1)], tx.init({"w": jnp.ones(1)}), {"w": 1.0})
    with pytest.raises(
        ValueError, match=r"`_replace` takes \['init', 'update', .*, got \['rate'\]"
    ):
        tx._replace(rate=None)


def test_a_copy_may_tell_something_else():
    tx = js.local_sgd("replica", sync_every=2)
    never = tx._replace(phase=lambda t, skipped=0: ())
    assert (never.phase(2), never.sized({"replica": 2}).phase(2), tx.phase(2)) == (
        (),
        (),
        ("average",),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        tx.phase = never.phase


def test_a_subclass_may_have_a_signature_of_its_own():
    class Never(js.ParameterTransform):
        def __new__(cls, period):
            return super().__new__(
                cls,
                lambda params: (),
                lambda updates, state, params=None, **extra: (updates, state),
                phase=lambda t, skipped=0: (),
                due=lambda t: False,
                schedules=(js.every(period),),
            )

    tx = Never(3)
    assert tx.schedules == (js.every(3),)
    assert type(tx._replace()) is type(copy.copy(tx)) is Never


def test_none_stands_for_the_default():
    names = ["exchange", "numerator", "reset", "permit", "anchor", "sized", "with_specs", "shares"]
    tx = js.ParameterTransform(
        lambda params: (),
        lambda updates, state, params=None, **extra: (updates, state),
        phase=lambda t, skipped=0: (),
        due=lambda t: False,
        schedules=(),
        **dict.fromkeys([*names, "state", "skipped"]),
    )
    assert tx.exchange(1.0, [], (), 0.0) == (1.0, [], ())
    assert (tx.numerator((), 2.0), tx.reset(()), tx.shares(())) == ((2.0, None), (), [(1.0, None)])
    assert tx.sized({}) is tx.with_specs(P()) is tx


# What the builder checks for all


def doubling():
    """A transform that doubles updates, and what its step was given."""

    def step(updates, others, state, params, *, communicate, weight, phase, **extra):
        seen.append((communicate, weight, phase, extra))
        return jax.tree.map(lambda u: 2 * u, updates), others, js.LocalSGDState(state.count + 1)

    seen: list = []
    tx = js.parameter_transform(
        "doubling",
        lambda params: js.LocalSGDState(jnp.zeros([], jnp.int32)),
        step,
        js.TransformSpec(
            schedule=js.ScheduleSpec.of("twice", 1), exchange=js.ExchangeSpec(axes=("replica",))
        ),
    )
    return tx, seen


def updated(tx, params, **keywords):
    def one(p):
        return tx.update(p, tx.init(p), p, **keywords)

    return jax.vmap(one, axis_name="replica")(params)


def test_a_step_is_given_checked_arguments():
    tx, seen = doubling()
    updates, state = updated(tx, jnp.ones((4, 2)), weight=3, phase=("twice",), value=1.0)
    assert jnp.array_equal(updates, jnp.full((4, 2), 2.0))
    assert state.count.tolist() == [1] * 4
    ((communicate, weight, phase, extra),) = seen
    assert (communicate, phase, extra) == (True, ("twice",), {"value": 1.0})
    assert (weight.dtype, weight.shape, float(weight)) == (jnp.float32, (), 3.0)
    assert tx.axes == ("replica",)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"phase": ("once",)}, r"doubling: `phase` must come from .*\['twice'\], got \('once',\)"),
        ({"weight": -1}, r"doubling: `weight` must be >= 0"),
    ],
)
def test_a_step_is_not_asked_for_what_it_cannot_do(keywords, said):
    tx, seen = doubling()
    with pytest.raises(ValueError, match=said):
        updated(tx, jnp.ones((4, 2)), **keywords)
    with pytest.raises(ValueError, match=r"doubling .*`update\(updates, state, params\)`"):
        tx.update(1.0, tx.init(1.0))
    assert not seen


def test_updates_of_an_idle_replica_do_not_reach_the_step():
    tx, _ = doubling()

    def one(p, u, weight):
        return tx.update(u, tx.init(p), p, weight=weight)[0]

    poison, weights = jnp.asarray([1.0, jnp.nan]), jnp.asarray([1.0, 0.0])
    found = jax.vmap(one, axis_name="replica")(jnp.ones(2), poison, weights)
    assert found.tolist() == [2, 0]


def test_phases_are_found_from_the_schedules():
    tx = js.ParameterTransform(
        lambda params: (),
        lambda updates, state, params=None, **extra: (updates, state),
        phase=lambda t, skipped=0: ("due",) if t % 3 == 0 else (),
        due=lambda t: t % 3 == 0,
        schedules=(js.every(3),),
    )
    assert tx.phases() == [(), ("due",)]
    assert js.phase_name(("average", "slow")) == "average+slow"
    assert js.phase_name(()) == "local"
