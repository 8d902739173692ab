"""Schedules against their definition, on the host and in programs; conditionals that exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.transform._due import prevent_fusion, unseen_zero

COUNTS = range(1, 100)
INT32 = np.iinfo(np.int32)
HUGE = 2**40
# At the edges of what a counter holds, and of what a period may be.
int32s = st.integers(INT32.min, INT32.max) | st.sampled_from([0, 1, INT32.min, INT32.max])
near_edges = st.integers(2**31 - 3, 2**31 + 3) | st.integers(2**32 - 3, 2**32 + 3)


def schedules_of(periods, starts, offsets):
    before = st.sampled_from(["none", "all"])
    return st.builds(js.every, periods, start=starts, offset=offsets, before=before)


schedules = schedules_of(st.integers(1, 9), st.integers(0, 12), st.integers(-7, 7))
huge_ones = schedules_of(
    st.integers(1, 9) | near_edges | st.integers(1, HUGE),
    st.integers(0, 9) | near_edges | st.integers(0, HUGE),
    st.integers(-9, 9) | near_edges | st.integers(-HUGE, HUGE),
)


def defined(schedule: js.spec.Every, t: int) -> bool:
    """The sentence of the contract."""
    if t <= schedule.start:
        return schedule.before == "all"
    return (t - schedule.start - schedule.offset) % schedule.k == 0


@settings(max_examples=30)
@given(schedules)
def test_due_as_defined(schedule):
    expected = [defined(schedule, t) for t in COUNTS]
    # How many were due up to an update, from which gossip knows its round.
    assert [schedule.times(t) for t in (0, *COUNTS)] == [0, *np.cumsum(expected)]
    multiples = expected == [t % schedule.k == 0 for t in COUNTS]
    assert schedule.is_plain == (multiples and not schedule.start and schedule.before == "none")


@settings(max_examples=60)
@given(int32s, huge_ones, st.data())
def test_arrays_agree_with_ints_whatever_their_size(t, schedule, data):
    """Instants that no array reaches included: the counter stays at the largest int32."""
    first = schedule.start + schedule.offset
    due = first + schedule.k * data.draw(st.integers(-2, 2))  # else hardly anything would be
    instants = [t, *(d for d in range(due - 1, due + 2) if INT32.min <= d <= INT32.max)]
    assert [schedule(i) for i in instants] == [defined(schedule, i) for i in instants]
    for counters in (np.asarray(instants, np.int32), jnp.asarray(instants, jnp.int32)):
        found = schedule(counters)
        assert (found.dtype, found.tolist()) == (bool, [schedule(i) for i in instants])


@pytest.mark.parametrize("k", [2**31, 2**32])
def test_a_period_beyond_the_counter_is_never_due(k):
    """As who wants no exchange at all may write it; the counter stays at its largest value."""
    tx, params = js.local_sgd("replica", sync_every=k), jnp.arange(2.0)

    def update(params):
        state = tx.init(params)._replace(count=jnp.int32(INT32.max))
        return tx.update(jnp.zeros_like(params), state, params)

    updates, state = jax.vmap(update, axis_name="replica")(params)
    assert (updates.tolist(), state.count.tolist()) == ([0, 0], [INT32.max] * 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_what_stands_for_zero_is_zero_whatever_the_value(dtype):
    """Of each sign, or the compiler's unseen predicate would choose the branch of zeros."""
    for value in (0, 1, -1, 100, -100):
        assert unseen_zero(jnp.full((3,), value, dtype)) == 0
        assert prevent_fusion(lambda x: 2 * x, jnp.full((3,), value, dtype), jnp.ones([])) == 2
    if jnp.issubdtype(dtype, jnp.floating):
        assert all(unseen_zero(jnp.full((1,), x, dtype)) == 0 for x in (np.nan, -np.nan, -np.inf))
