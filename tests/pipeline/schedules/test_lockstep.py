"""Tables made for lockstep: within their limit, and no worse than what is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from pipeline.schedules.replay import all_once, replayed


def times(forward, backward_input, backward_weight):
    return {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
    }


# stages, microbatches; F, B, W; the best of the other kinds with a stash of p, of 2 p - 1, and
# ticks of one F and one B
TABLE = [
    (4, 16, (1, 1, 1), 0.059, 0.059, 0.158),
    (8, 32, (29.7, 29.4, 19.9), 0.170, 0.117, 0.179),
    (8, 64, (29.7, 29.4, 19.9), 0.143, 0.062, 0.099),
    (8, 64, (1, 1, 1), 0.035, 0.035, 0.099),
    (8, 64, (1, 2, 1), 0.342, 0.135, 0.099),
]


@pytest.mark.parametrize(("p", "m", "costs", "narrow", "wide", "ticks"), TABLE[:2])
def test_no_worse_than_other_kinds_in_lockstep(p, m, costs, narrow, wide, ticks):
    for limit, known in ((p, narrow), (2 * p - 1, min(wide, ticks))):
        table = js.schedules.lockstep(p, m, most_stash=limit, **times(*costs))
        assert max(table.stash) <= limit
        assert round(table.simulate(**times(*costs), lockstep=True).bubble, 3) <= known


@pytest.mark.exhaustive
@pytest.mark.parametrize(("p", "m", "costs", "narrow", "wide", "ticks"), TABLE[2:])
def test_no_worse_than_other_kinds_with_more_microbatches(p, m, costs, narrow, wide, ticks):
    test_no_worse_than_other_kinds_in_lockstep(p, m, costs, narrow, wide, ticks)


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
    done, most = replayed(table.orders(), table.num_model_stages)
    assert all_once(table, done)
    assert table.stash == tuple(most)
    assert max(most) <= limit
    time = table.simulate(**costs, send=send, lockstep=True).time
    # The last stage waits for the first F, and the first one for the last gradient.
    assert time >= (p - 1) * (f + b) / v + m * (f + b) + w / v - 1e-9
    if v == 1 and limit >= 2 * p - 1:
        assert time <= (m + p - 1) * (f + b + w) + (m + 2 * (p - 1)) * send + 1e-9
    # Columns are ticks, so that what is printed can be read again.
    again = js.schedules.from_table(table.orders(), lockstep=True, name="lockstep")
    assert again == table


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (4, 16)])
def test_without_times_it_is_good_for_many(p, m):
    """No worse than ticks of one F and one B also under times that it was not made for."""
    table = js.schedules.lockstep(p, m)
    for costs in ((1, 1, 1), (29.7, 29.4, 19.9), (1, 2, 1), (1, 1, 0.5), (1, 2, 0.5), (1, 3, 1)):
        time = table.simulate(**times(*costs), lockstep=True).time
        assert time <= (m + p - 1) * sum(costs) + 1e-9


def test_times_of_each_stage():
    """A first and a last stage that take longer, as with an embedding and a loss."""
    forward, backward = [1.5, 1, 1, 2], [1.5, 1, 1, 2]
    costs = times(forward, backward, 1.0)
    table = js.schedules.lockstep(4, 12, **costs)
    blind = js.schedules.lockstep(4, 12)
    time = table.simulate(**costs, lockstep=True).time
    assert time <= blind.simulate(**costs, lockstep=True).time
    assert time <= js.schedules.zero_bubble(4, 12, memory=2).simulate(**costs, lockstep=True).time


def test_a_column_of_f_and_one_of_b_are_one_tick():
    """Where W takes no time of its own, nothing beats ticks of one F and one B."""
    table = js.schedules.lockstep(3, 5, send=1.0, backward_weight=0.0)
    assert len(table.ticks()) == 5 + 2 * 2
    assert [op.kind for op in table.ticks()[4][2]] == ["F", "BW"]
    assert table.orders()[2].startswith(",,,,2F0,2B0,2F1,2B1")


def test_defaults_and_limits():
    assert max(js.schedules.lockstep(3, 9).stash) <= 5
    assert max(js.schedules.lockstep(2, 4, 2).stash) <= 6
    assert js.schedules.lockstep(3, 6, most_stash=1).stash == (1, 1, 1)
    with pytest.raises(ValueError, match="room for a microbatch of each of the chunks, 2, got 1"):
        js.schedules.lockstep(2, 4, 2, most_stash=1)
    with pytest.raises(ValueError, match="`most_stash` must be an int >= 1, got 0"):
        js.schedules.lockstep(2, 4, most_stash=0)
    with pytest.raises(ValueError, match="`backward_input` must be a finite time"):
        js.schedules.lockstep(2, 4, backward_input=-1)
    assert js.schedules.lockstep(4, 8) == js.schedules.lockstep(4, 8)
