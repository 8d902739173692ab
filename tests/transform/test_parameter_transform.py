"""Parameter transforms are tuples with more beside them: copies and changes reach all of it."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.transforms import TRANSFORMS

ONE = {"w": jnp.ones(1)}


def never(t, skipped=0):
    return ()


def times(n):
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda u: n * u, updates), state

    return update


def plain(**named):
    told = {"phase": never, "due": lambda t: False, "schedules": (), **named}
    return js.ParameterTransform(lambda params: (), times(1), **told)


def result_of(tx):
    """What its `exchange`, which the step builder calls, makes of 1."""
    return tx.exchange({"w": 1.0}, [], tx.init(ONE), {"w": 1.0})[0]["w"]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda tx: tx._replace()])
def test_copies_are_whole(make):
    tx = TRANSFORMS["slowmo over sgp"]()
    twin = make(tx)
    assert type(twin) is type(tx)
    assert vars(twin).keys() == vars(tx).keys() == {"spec"}
    assert (*twin,) == (*tx,) == (tx.init, tx.update)
    assert (twin.phases(), twin.axes) == (tx.phases(), ("replica",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tx.phase = never


def test_none_stands_for_the_default():
    names = ["exchange", "numerator", "reset", "permit", "anchor", "sized", "with_specs", "shares"]
    tx = plain(**dict.fromkeys([*names, "state", "skipped"]))
    assert tx.exchange(1.0, [], (), 0.0) == (1.0, [], ())
    assert (tx.numerator((), 2.0), tx.reset(()), tx.shares(())) == ((2.0, None), (), [(1.0, None)])
    assert tx.sized({}) is tx.with_specs(P()) is tx


def test_phases_are_found_from_the_schedules_and_have_names():
    tx = plain(phase=lambda t, skipped=0: ("due",) * (t % 3 == 0), schedules=(js.every(3),))
    assert tx.phases() == [(), ("due",)]
    # Of several the longest is not needed in full: of these it would be 10^18 updates.
    rare = [js.every(10**9 - 1), js.every(10**9)]
    both = plain(
        phase=lambda t, skipped=0: tuple(i for i, s in enumerate(rare) if s(t)), schedules=rare
    )
    assert set(both.phases()) >= {(), (0,), (1,)}
    assert [js.phase_name(phase) for phase in (("average", "slow"), ())] == [
        "average+slow",
        "local",
    ]


def changed_by_replace(tx, **schedule):
    return tx._replace(**schedule)


def changed_by_spec(tx, **schedule):
    spec = dataclasses.replace(tx.spec, schedule=dataclasses.replace(tx.spec.schedule, **schedule))
    return js.ParameterTransform(tx.init, tx.update, spec)


@pytest.mark.parametrize("change", [changed_by_replace, changed_by_spec])
@pytest.mark.parametrize("name", ["sgp", "slowmo", "only_finite around slowmo", "local_sgd"])
def test_a_change_holds_for_known_axes_and_layouts(name, change):
    tx = TRANSFORMS[name]()
    changed = change(tx, phase=never)
    for made in (changed, changed.sized({"replica": 4}), changed.with_specs({"w": P()})):
        again = made.sized({"replica": 4}).with_specs({"w": P()})
        assert made.phases() == again.phases() == [()]
    assert tx.sized({"replica": 4}).phases() == tx.phases() != [()]


def test_what_is_unchanged_is_what_the_mesh_decides():
    """Not the values from before the number of replicas was known."""
    sized = changed_by_spec(js.sgp("replica"), skipped=None).sized({"replica": 4})
    assert sized.skipped is None
    assert len(sized.phases()) == 2  # the rounds of four replicas


def test_an_exchange_goes_with_its_update():
    """Whoever gives another update: else the step builder would go past it."""
    tx = js.local_sgd("replica")
    twice = js.ParameterTransform(tx.init, times(2), tx.spec)
    for n, made in {
        2: twice,
        3: twice._replace(update=times(3)),
        4: js.ParameterTransform(tx.init, times(4), twice.spec),
        5: tx._replace(update=times(5)).sized({"replica": 2}).with_specs({"w": P()}),
    }.items():
        assert result_of(made) == n
    assert twice._replace(update=tx.update, exchange=tx.exchange).exchange is tx.exchange


def test_values_by_name_go_before_those_of_the_spec():
    tx = js.local_sgd("replica", sync_every=2)
    often = js.ParameterTransform(tx.init, tx.update, tx.spec, schedules=(js.every(7),))
    assert often.schedules == often.spec.schedule.schedules == (js.every(7),)
    assert (often.axes, often.exchange) == (tx.axes, tx.exchange)
