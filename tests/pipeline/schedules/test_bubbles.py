"""Orders and bubbles as others recorded and published them, and tables in torch's notation."""

import json

import pytest

import jaxslowmo as js
from pipeline.schedules.replay import all_once, replayed
from support.golden_peers import FOLDER

COLOSSAL = json.loads((FOLDER / "pipeline_schedule.json").read_text())["cases"]
TORCH = json.loads((FOLDER / "torch_schedules.json").read_text())


def of_colossal(case):
    sizes = case["stages"], case["microbatches"]
    if case["schedule"] == "1f1b":
        return js.schedules.one_f_one_b(*sizes, forward_only=case["forward_only"])
    return js.schedules.interleaved(
        *sizes,
        case["chunks"],
        forward_only=case["forward_only"],
        warm_up="all" if case["stages"] == case["microbatches"] else "few",
    )


@pytest.mark.parametrize(("kind", "count"), [("1f1b", 31), ("interleaved", 16)])
def test_compute_orders_of_colossal(kind, count):
    cases = [case for case in COLOSSAL if case["schedule"] == kind]
    assert len(cases) == count
    for case in cases:
        schedule = of_colossal(case)
        width = 2 + (kind == "interleaved")
        rows = [
            [[op.kind[0], op.microbatch, op.chunk][:width] for op in row if op]
            for row in schedule.rows
        ]
        assert rows == [[op for op in row if op[0] in "FB"] for row in case["ops"]], case["id"]
        assert schedule.forward_only == case["forward_only"]


OURS = {
    "interleaved_1f1b": lambda p, m, v: js.schedules.interleaved(p, m, v),
    "zbv": lambda p, m, v: js.schedules.zbv(p, m),
}


@pytest.mark.parametrize("kind", sorted({case["schedule"] for case in TORCH}))
def test_tables_of_torch_are_read_printed_and_simulated(kind):
    # torch makes no table for DualPipeV with fewer microbatches.
    cases = [case for case in TORCH if case["schedule"] == kind and "error" not in case]
    assert cases
    for case in cases:
        schedule = js.schedules.from_table(case["orders"])
        assert schedule.orders() == case["orders"]
        p, m, v = case["stages"], case["microbatches"], case["chunks"]
        assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (p, m, v)
        if kind in OURS:
            assert OURS[kind](p, m, v).orders() == case["orders"]
        replay = replayed(schedule.orders(), p * v)
        assert all_once(schedule, replay.done)
        assert schedule.stash == tuple(replay.most)
        # The bubbles that their papers state, with F = B = W.
        bubble = schedule.simulate().bubble
        if kind in ("looped_bfs", "interleaved_1f1b") and m >= p:
            assert bubble == pytest.approx((p - 1) / (v * m + p - 1))
        elif kind == "zbv" and m >= 2 * p - 1:
            assert bubble == pytest.approx(0)


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


def test_placement_and_forward_only_are_read_off_the_rows():
    for made in (js.schedules.zbv(2, 3), js.schedules.gpipe(2, 2, forward_only=True)):
        assert js.schedules.from_table(made.orders(), name=made.name) == made
    assert js.schedules.zbv(2, 3).placement == (0, 1, 1, 0)


def test_an_overlap_whose_halves_wait_for_each_other_is_two_ticks():
    rows = ["0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,(1F1;1B0)OVERLAP_F_B,1B1"]
    schedule = js.schedules.from_table(rows)
    kinds = [["+".join(op.kind for op in cell) for cell in tick] for tick in schedule.ticks()]
    assert kinds == [["F", ""], ["", "F"], ["F", ""], ["", "F+BW"], ["BW", "BW"], ["BW", ""]]
    assert schedule.orders() == rows
