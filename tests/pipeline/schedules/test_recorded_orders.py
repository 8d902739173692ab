"""Orders as ColossalAI and torch recorded them."""

import json

import pytest

import jaxslowmo as js
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
