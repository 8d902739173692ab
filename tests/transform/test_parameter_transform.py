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
    assert vars(twin).keys() == vars(tx).keys() == {"spec"}
    assert len(twin) == len(tx) == 2
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


# What is changed stays so


def changed_by_replace(tx, **schedule):
    return tx._replace(**schedule)


def changed_by_spec(tx, **schedule):
    spec = dataclasses.replace(tx.spec, schedule=dataclasses.replace(tx.spec.schedule, **schedule))
    return js.ParameterTransform(tx.init, tx.update, spec)


@pytest.mark.parametrize("change", [changed_by_replace, changed_by_spec])
@pytest.mark.parametrize("name", ["sgp", "slowmo", "only_finite around slowmo", "local_sgd"])
def test_a_change_holds_for_known_axes_and_layouts(name, change):
    tx = TRANSFORMS[name]()
    never = change(tx, phase=lambda t, skipped=0: ())
    for made in (never, never.sized({"replica": 4}), never.with_specs({"w": P()})):
        again = made.sized({"replica": 4}).with_specs({"w": P()})
        assert made.phases() == again.phases() == [()]
        assert made.numerator is not None
    assert tx.sized({"replica": 4}).phases() == tx.phases() != [()]


def test_what_is_unchanged_is_what_the_mesh_decides():
    """Not the values from before the number of replicas was known."""
    tx = changed_by_spec(js.sgp("replica"), skipped=None)
    sized = tx.sized({"replica": 4})
    assert sized.skipped is None
    assert len(sized.phases()) == 2  # the rounds of four replicas


def test_an_exchange_goes_with_its_update():
    """Whoever gives another update: else the step builder would go past it."""

    def times(n):
        def update(updates, state, params=None, **extra):
            return jax.tree.map(lambda u: n * u, updates), state

        return update

    tx = js.local_sgd("replica")
    state = tx.init({"w": jnp.ones(1)})
    twice = js.ParameterTransform(tx.init, times(2), tx.spec)
    for n, made in {
        2: twice,
        3: twice._replace(update=times(3)),
        4: js.ParameterTransform(tx.init, times(4), twice.spec),
    }.items():
        assert made.exchange({"w": 1.0}, [], state, {"w": 1.0})[0] == {"w": float(n)}
    assert twice._replace(update=tx.update, exchange=tx.exchange).exchange is tx.exchange


def test_values_by_name_go_before_those_of_the_spec():
    tx = js.local_sgd("replica", sync_every=2)
    often = js.ParameterTransform(tx.init, tx.update, tx.spec, schedules=(js.every(7),))
    assert often.schedules == often.spec.schedule.schedules == (js.every(7),)
    assert often.axes == tx.axes
    assert often.exchange is tx.exchange


# Misuse


def plain(*args, **named):
    return js.ParameterTransform(
        lambda params: (), lambda u, s, p=None, **extra: (u, s), *args, **named
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: plain(rate=1), r"takes \['init', 'update', 'spec', 'anchor', .*got \['rate'\]"),
        (lambda: plain(js.every(3)), r"`spec` must be a js\.TransformSpec\(.*got Every"),
        (lambda: plain(), r"must be given `phase`, `due`, `schedules`: by name, or"),
        (lambda: plain(phase=len, due=None, schedules=()), r"must be given `due`: by name, or"),
        (lambda: js.local_sgd("replica")._replace(due=None), r"`_replace` must be given `due`"),
    ],
)
def test_what_it_is_not_made_of(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_what_it_does_not_say():
    tx = js.local_sgd("replica")
    with pytest.raises(AttributeError, match=r"'ParameterTransform' .* no attribute 'rate'"):
        getattr(tx, "rate")  # noqa: B009
    assert not hasattr(tx, "__jax_array__")
