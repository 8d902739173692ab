"""`js.every` against its definition, on the host and in programs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.transform import as_schedule

COUNTS = range(1, 200)

schedules = st.builds(
    js.every,
    st.integers(1, 9),
    start=st.integers(0, 12),
    offset=st.integers(-7, 7),
    before=st.sampled_from(["none", "all"]),
)


def defined(schedule: js.Every, t: int) -> bool:
    """The sentence of the contract."""
    if t <= schedule.start:
        return schedule.before == "all"
    return (t - schedule.start - schedule.offset) % schedule.k == 0


def slow_over_local(own: js.Every, slow: js.Every) -> js.ParameterTransform:
    with warnings.catch_warnings():  # any pair of periods is fine here
        warnings.filterwarnings("ignore", message=".*not a multiple")
        return js.slowmo("replica", base=js.local_sgd("replica", sync_every=own), sync_every=slow)


@given(schedules)
def test_due_as_defined_on_the_host(schedule):
    for t in COUNTS:
        assert schedule(t) is defined(schedule, t)


@given(schedules)
def test_host_and_program_agree(schedule):
    expected = [defined(schedule, t) for t in COUNTS]
    counts = jnp.asarray(list(COUNTS), jnp.int32)
    assert np.array_equal(schedule(counts), expected)


def test_traced_count_and_host_count_agree():
    for schedule in (js.every(3), js.every(4, start=5, offset=-2, before="all")):
        traced = jax.jit(jax.vmap(schedule))(jnp.arange(1, 40))
        assert traced.dtype == bool
        assert np.array_equal(traced, [schedule(t) for t in range(1, 40)])


INT32 = np.iinfo(np.int32)
HUGE = 2**40
# At the edges of what a counter holds, and of what a period may be.
int32s = st.integers(INT32.min, INT32.max) | st.sampled_from([0, 1, INT32.min, INT32.max])
near_edges = st.integers(2**31 - 3, 2**31 + 3) | st.integers(2**32 - 3, 2**32 + 3)


@given(
    int32s,
    st.builds(
        js.every,
        st.integers(1, 9) | near_edges | st.integers(1, HUGE),
        start=st.integers(0, 9) | near_edges | st.integers(0, HUGE),
        offset=st.integers(-9, 9) | near_edges | st.integers(-HUGE, HUGE),
        before=st.sampled_from(["none", "all"]),
    ),
    st.data(),
)
@settings(max_examples=200)
def test_arrays_agree_with_ints_whatever_their_size(t, schedule, data):
    """Instants that no array reaches included: the counter stays at the largest int32."""
    first = schedule.start + schedule.offset
    due = first + schedule.k * data.draw(st.integers(-2, 2))  # else hardly anything would be
    instants = [t, *(d for d in range(due - 1, due + 2) if INT32.min <= d <= INT32.max)]
    for instant in instants:
        expected = schedule(instant)
        assert type(expected) is bool
        for counter in (np.int32(instant), np.full((2,), instant, np.int32)):
            found = schedule(counter)
            assert found.dtype == bool
            assert found.shape == np.shape(counter)
            assert np.all(found == expected), (schedule, instant)
    found = schedule(jnp.asarray(instants, jnp.int32))
    assert found.dtype == bool
    assert np.array_equal(found, [schedule(i) for i in instants])


@pytest.mark.parametrize("k", [2**31, 2**31 + 1, 2**32, 2**40])
def test_a_period_beyond_the_counter_is_never_due(k, strict_promotion):
    """As who wants no exchange at all may write it."""
    tx = js.local_sgd("replica", sync_every=k)
    params = jnp.arange(2.0)

    def update(params, count):
        state = tx.init(params)._replace(count=count)
        return tx.update(jnp.zeros_like(params), state, params)

    updates, state = jax.vmap(update, axis_name="replica", in_axes=(0, None))(
        params, jnp.int32(INT32.max)
    )
    assert np.array_equal(updates, np.zeros(2))
    assert np.array_equal(state.count, [INT32.max] * 2)
    assert js.every(k)(k)
    assert not js.every(k)(k + 1)


def test_examples():
    assert [t for t in range(1, 13) if js.every(4)(t)] == [4, 8, 12]
    post_local = js.every(3, start=2, before="all")
    assert [t for t in range(1, 10) if post_local(t)] == [1, 2, 5, 8]
    assert [t for t in range(1, 10) if js.every(3, start=2)(t)] == [5, 8]
    assert [t for t in range(1, 10) if js.every(3, offset=1)(t)] == [1, 4, 7]


@given(st.integers(1, 9), st.integers(-20, 20))
def test_an_int_is_a_plain_schedule(k, offset):
    assert as_schedule(k) == js.every(k)
    assert as_schedule(k).is_plain
    shifted = js.every(k, offset=offset)
    multiples = all(shifted(t) == (t % k == 0) for t in range(1, 4 * k + 1))
    assert shifted.is_plain == multiples


def test_schedules_are_values():
    assert js.every(3, start=2) == js.every(3, start=2) != js.every(3)
    assert len({js.every(3), js.every(3), js.every(3, before="all")}) == 2
    with pytest.raises(AttributeError):
        js.every(3).k = 4


@given(schedules, schedules)
def test_phases_lists_every_phase_that_occurs(own, slow):
    tx = slow_over_local(own, slow)
    seen = {tx.phase(t) for t in range(1, 300)}
    assert set(tx.phases()) == seen
    assert len(tx.phases()) == len(seen)
    assert all(hash(phase) == hash(tuple(phase)) for phase in seen)


@given(schedules, schedules)
def test_a_phase_is_local_exactly_when_nothing_is_due(own, slow):
    tx = slow_over_local(own, slow)
    for t in range(1, 60):
        assert bool(tx.due(t)) == bool(tx.phase(t))
        assert ("slow" in tx.phase(t)) == defined(slow, t)
        # An exact average replaces the base's own exchange.
        assert ("average" in tx.phase(t)) == (defined(own, t) and not defined(slow, t))


def test_base_exchange_stays_where_the_average_is_not_exact():
    base = js.local_sgd("replica", sync_every=2)
    tx = js.slowmo("replica", base=base, sync_every=4, exact_average=False)
    assert [tx.phase(t) for t in range(1, 5)] == [(), ("average",), (), ("average", "slow")]
    assert [js.phase_name(p) for p in tx.phases()] == ["local", "average", "average+slow"]


def test_phase_order_follows_the_counter():
    tx = js.slowmo("replica", base=js.local_sgd("replica", sync_every=3), sync_every=6)
    assert [js.phase_name(tx.phase(t)) for t in range(1, 8)] == [
        "local",
        "local",
        "average",
        "local",
        "local",
        "slow",
        "local",
    ]
    assert js.diloco("replica", sync_every=2).phases() == [(), ("slow",)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, r"`k` counts updates and must be an int >= 1, got 0"),
        ({"k": -3}, r"`k` .* got -3"),
        ({"k": 2.0}, r"`k` .* got 2\.0"),
        ({"k": True}, r"`k` .* got True"),
        ({"k": 3, "start": -1}, r"`start` .* >= 0, got -1"),
        ({"k": 3, "offset": 0.5}, r"`offset` .* int, got 0\.5"),
        ({"k": 3, "before": "some"}, r"`before` must be \"none\" or \"all\", got 'some'"),
    ],
)
def test_bad_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        js.every(**arguments)


@pytest.mark.parametrize("k", [0, -1])
def test_the_class_refuses_what_every_refuses(k):
    with pytest.raises(ValueError, match=rf"`k` .* >= 1, got {k}"):
        js.local_sgd("replica", sync_every=js.Every(k))
