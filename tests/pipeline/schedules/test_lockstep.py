"""Tables made for lockstep: within their limit, the shortest of small ones, no worse than known."""

import heapq
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from pipeline.schedules.replay import all_once, replayed


def times(forward, backward_input, backward_weight):
    return {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
    }


def least_time(p, m, costs, most):
    """Return the least time of all tables with one operation per stage and tick."""

    def options(state, s):
        f, b, w = state[s]
        yield None
        if f < m and f - w < most and (s == 0 or state[s - 1][0] > f):
            yield 0
        if b < f and (s == p - 1 or state[s + 1][1] > b):
            yield 1
        if w < b:
            yield 2

    waiting, known = [(0.0, ((0, 0, 0),) * p)], set()
    while True:
        spent, state = heapq.heappop(waiting)
        if state in known:
            continue
        known.add(state)
        if state == ((m, m, m),) * p:
            return spent
        for chosen in product(*(options(state, s) for s in range(p))):
            if any(x is not None for x in chosen):
                lasts = max(costs[x] for x in chosen if x is not None)
                after = tuple(
                    tuple(n + (i == x) for i, n in enumerate(counts))
                    for counts, x in zip(state, chosen, strict=True)
                )
                heapq.heappush(waiting, (spent + lasts, after))


halves = st.integers(1, 6).map(lambda n: n / 2)


@settings(max_examples=25)
@given(st.data())
def test_no_table_of_a_small_pipeline_is_shorter(data):
    p, m = data.draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2)]))
    costs = [data.draw(halves) for _ in "FBW"]
    most = data.draw(st.integers(1, 2 * p - 1))
    table = js.schedules.lockstep(p, m, most_stash=most, **times(*costs))
    found = table.simulate(**times(*costs), lockstep=True).time
    assert found == pytest.approx(least_time(p, m, costs, most))


numbers = st.integers(0, 8).map(lambda n: n / 4)


@given(st.data())
def test_within_the_limit_and_no_worse_than_one_f_and_one_b(data):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    v = data.draw(st.sampled_from([1, 1, 2]))
    limit = data.draw(st.integers(v, v * (2 * p + 1)))
    f, b, w = data.draw(numbers), data.draw(numbers), data.draw(numbers.filter(bool))
    send = data.draw(st.sampled_from([0.0, 0.25]))
    costs = times(f, b, w)
    table = js.schedules.lockstep(p, m, v, most_stash=limit, **costs, send=send)
    replay = replayed(table.orders(), table.num_model_stages)
    assert all_once(table, replay.done)
    assert table.stash == tuple(replay.most)
    assert max(replay.most) <= limit
    time = table.simulate(**costs, send=send, lockstep=True).time
    # The last stage waits for the first F, and the first one for the last gradient.
    assert time >= (p - 1) * (f + b) / v + m * (f + b) + w / v - 1e-9
    if v == 1 and limit >= 2 * p - 1:
        assert time <= (m + p - 1) * (f + b + w) + (m + 2 * (p - 1)) * send + 1e-9
    # Columns are ticks, so that what is printed can be read again.
    again = js.schedules.from_table(table.orders(), lockstep=True, name="lockstep")
    assert again == table


def test_the_default_limit_is_that_of_ticks_of_one_f_and_one_b():
    assert max(js.schedules.lockstep(3, 9).stash) <= 5
    assert max(js.schedules.lockstep(2, 4, 2).stash) <= 6
    assert js.schedules.lockstep(3, 6, most_stash=1).stash == (1, 1, 1)
    # Less than of ZB-H1 and ZB-H2, which are made for stages that run freely, and of 1F1B: 0.158.
    assert round(js.schedules.lockstep(4, 16).simulate(lockstep=True).bubble, 3) <= 0.059
