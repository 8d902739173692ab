"""What the builder of parameter transforms checks for all."""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js


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


def test_axes_must_be_told():
    spec = js.TransformSpec(schedule=js.ScheduleSpec.of("x", 1), exchange=js.ExchangeSpec())
    with pytest.raises(ValueError, match=r"own: `spec\.exchange\.axes` must be the name"):
        js.parameter_transform("own", lambda params: (), lambda *args, **extra: args, spec)
