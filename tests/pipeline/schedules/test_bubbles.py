"""Bubbles: published ones, those of the formulas, and those worked by hand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.golden_peers import FOLDER

PUBLISHED = json.loads((FOLDER / "zero_bubble.json").read_text())["rows"]
TIMES = "forward", "backward_input", "backward_weight", "send"


def h1(p, m):
    return js.schedules.zero_bubble(p, m)


def h2(p, m):
    return js.schedules.zero_bubble(p, m, memory=2)


def costs(*times):
    return dict(zip(TIMES, times, strict=False))


def row_of(row):
    name = f"{row['stages']}x{row['microbatches']}"
    is_large = row["stages"] * row["microbatches"] >= 16 * 128
    return pytest.param(row, id=name, marks=[pytest.mark.exhaustive] * is_large)


@pytest.mark.parametrize("row", [row_of(row) for row in PUBLISHED])
def test_published_rates(row):
    sizes = row["stages"], row["microbatches"]
    times = costs(*(row[f"t_{name}"] for name in TIMES))
    made = {"1f1b": js.schedules.one_f_one_b, "zb_h1": h1, "zb_h2": h2, "zb_1p": h1}
    for name, make in made.items():
        assert round(make(*sizes).simulate(**times).bubble, 4) == row[name], name
    # Their models have 3, 4, 3 and 2 layers per stage.
    layers = {(8, 18): 3, (8, 29): 4, (16, 11): 3, (32, 10): 2}
    chunks = layers[row["stages"], int(row["t_forward"])]
    bubble = js.schedules.interleaved(*sizes, chunks).simulate(**times).bubble
    assert abs(round(bubble, 4) - row["interleaved_1f1b"]) <= 0.0035 + 1e-9


numbers = st.integers(1, 20).map(lambda n: n / 4)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), numbers, numbers, numbers)
def test_formulas(p, rounds, v, forward, backward_input, backward_weight):
    m = p * rounds
    times = costs(forward, backward_input, backward_weight)

    def bubble(schedule):
        return schedule.simulate(**times).bubble

    flat, chunked = ((p - 1) / (n * m + p - 1) for n in (1, v))
    assert bubble(js.schedules.gpipe(p, m)) == pytest.approx(flat)
    assert bubble(js.schedules.one_f_one_b(p, m)) == pytest.approx(flat)
    assert bubble(js.schedules.gpipe(p, m, v)) == pytest.approx(chunked)
    for warm_up in ("few", "all"):
        schedule = js.schedules.interleaved(p, m, v, warm_up=warm_up)
        assert bubble(schedule) == pytest.approx(chunked)
    work = m * (forward + backward_input + backward_weight)
    for memory in (1, 2):
        idle = (p - 1) * (forward + backward_input - memory * backward_weight)
        if idle >= 0 and backward_weight <= forward and rounds >= memory:
            got = bubble(js.schedules.zero_bubble(p, m, memory=memory))
            assert got == pytest.approx(idle / (work + idle), abs=1e-12)


def test_worked_by_hand():
    """Two stages, two microbatches, B and W of 1, F of 2, half a unit on the way."""
    schedule = js.schedules.one_f_one_b(2, 2)
    apart = schedule.simulate(forward=2, send=0.5)
    # Stage 0: F0 0..2, F1 2..4, B0 7..9, B1 11..13. Stage 1: F0 2.5..4.5, B0 4.5..6.5, ...
    first, second = apart.timeline
    assert [(t.start, t.end) for t in first] == [(0, 2), (2, 4), (7, 9), (11, 13)]
    assert [(t.start, t.end) for t in second] == [(2.5, 4.5), (4.5, 6.5), (6.5, 8.5), (8.5, 10.5)]
    assert apart.bubble == pytest.approx(1 - 8 / 13)
    assert (apart.stash, apart.sends) == ((2, 1), (2, 2))
    # F0 | F1 F0 | B0 | B0 F1 | B1 | B1: six ticks of 2 and half a unit each.
    assert schedule.simulate(forward=2, send=0.5, lockstep=True).time == 15
    forward = js.schedules.gpipe(4, 8, forward_only=True).simulate(forward=3, lockstep=True)
    assert forward.time == (8 + 3) * 3
    assert forward.bubble == pytest.approx(3 / 11)
    assert forward.sends == (8, 8, 8, 0)


def test_costs_per_stage_and_per_stage_of_the_model():
    schedule = js.schedules.interleaved(2, 2, 2)
    whole = schedule.simulate(forward=2.0)
    assert schedule.simulate(forward=[2.0, 2.0]) == whole
    assert schedule.simulate(forward=(1.0, 1.0, 1.0, 1.0)) == whole
    uneven = schedule.simulate(forward=[2.0, 1.0, 2.0, 1.0])
    assert uneven == schedule.simulate(forward=[4.0, 2.0])
    # Stage 0: 2 microbatches of 4 + 1 + 1, stage 1 of 2 + 1 + 1.
    assert uneven.bubble == pytest.approx(1 - (12 + 8) / 2 / uneven.time)
