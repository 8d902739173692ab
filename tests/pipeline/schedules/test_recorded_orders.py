"""Orders as ColossalAI and torch recorded them."""

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


@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_compute_orders_of_colossal(kind):
    cases = [case for case in COLOSSAL if case["schedule"] == kind]
    assert len(cases) == {"1f1b": 31, "interleaved": 16}[kind]
    for case in cases:
        schedule = of_colossal(case)
        rows = [
            [
                [op.kind[0], op.microbatch, op.chunk][: 2 + (kind == "interleaved")]
                for op in row
                if op
            ]
            for row in schedule.rows
        ]
        assert rows == [[op for op in row if op[0] in "FB"] for row in case["ops"]], case["id"]
        assert schedule.forward_only == case["forward_only"]


def of_torch(kind):
    return [case for case in TORCH if case["schedule"] == kind]


def test_interleaved_is_torchs():
    cases = of_torch("interleaved_1f1b")
    assert len(cases) == 28
    for case in cases:
        schedule = js.schedules.interleaved(case["stages"], case["microbatches"], case["chunks"])
        assert schedule.orders() == case["orders"]


def test_zbv_is_torchs():
    cases = of_torch("zbv")
    assert len(cases) == 14
    for case in cases:
        schedule = js.schedules.zbv(case["stages"], case["microbatches"])
        assert schedule.orders() == case["orders"]


@pytest.mark.parametrize("kind", sorted({case["schedule"] for case in TORCH}))
def test_tables_of_torch_are_read_and_printed_equal(kind):
    for case in of_torch(kind):
        if "error" in case:  # torch makes no table: DualPipeV with fewer microbatches
            assert "orders" not in case
            continue
        schedule = js.schedules.from_table(case["orders"])
        assert schedule.orders() == case["orders"]
        sizes = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
        assert sizes == (case["stages"], case["chunks"], case["microbatches"])
        check_simulation(schedule)


def check_simulation(schedule):
    """A table of torch against the replay, and its times against what its work needs at least."""
    done, most = replayed(schedule.orders(), schedule.num_model_stages)
    assert all_once(schedule, done)
    assert schedule.stash == tuple(most)
    free, together = schedule.simulate(), schedule.simulate(lockstep=True)
    work = 3 * schedule.num_microbatches
    for line in free.timeline:
        assert sum(timed.end - timed.start for timed in line) == pytest.approx(work)
    assert work <= free.time <= together.time
    assert together.bubble == pytest.approx(1 - work / together.time)


def test_what_torchs_tables_promise():
    """The bubbles that their papers state, with F = B = W."""
    for case in TORCH:
        if "error" in case:
            continue
        p, m, v = case["stages"], case["microbatches"], case["chunks"]
        bubble = js.schedules.from_table(case["orders"]).simulate().bubble
        if case["schedule"] in ("looped_bfs", "interleaved_1f1b") and m >= p:
            assert bubble == pytest.approx((p - 1) / (v * m + p - 1))
        elif case["schedule"] == "zbv" and m >= 2 * p - 1:
            assert bubble == pytest.approx(0)
