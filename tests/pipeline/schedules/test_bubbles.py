"""Bubbles: published ones, and those of the formulas."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.golden_peers import FOLDER

PUBLISHED = json.loads((FOLDER / "zero_bubble.json").read_text())["rows"]
TIMES = "forward", "backward_input", "backward_weight", "send"


def costs(*times):
    return dict(zip(TIMES, times, strict=False))


SMALL = [row for row in PUBLISHED if row["stages"] * row["microbatches"] < 16 * 128]


@pytest.mark.parametrize("row", SMALL)
def test_published_rates(row):
    sizes = row["stages"], row["microbatches"]
    times = costs(*(row[f"t_{name}"] for name in TIMES))
    made = {
        "1f1b": js.schedules.one_f_one_b(*sizes),
        "zb_h1": js.schedules.zero_bubble(*sizes),
        "zb_h2": js.schedules.zero_bubble(*sizes, memory=2),
    }
    for name, schedule in made.items():
        assert round(schedule.simulate(**times).bubble, 4) == row[name], name
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
