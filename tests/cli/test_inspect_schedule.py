"""`jaxslowmo inspect schedule`: the grid, what kinds cost, files."""

import json
import re

import pytest

import jaxslowmo as js
from jaxslowmo.cli.config._mesh import PIPELINES

SIZES = ("--stages", 4, "--microbatches", 8)


def test_kinds_of_help_are_those_of_the_library(call):
    assert tuple(js.schedules.KINDS) == PIPELINES
    out = call("inspect", "schedule", "--help").out
    assert f"Kinds: {', '.join(PIPELINES)}." in out


def test_the_grid_and_the_kinds_beside_it(call):
    outcome = call("inspect", "schedule", "zero_bubble", *SIZES, "--backward-weight", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("zero_bubble: 4 stages, 8 microbatches")
    schedule = js.schedules.zero_bubble(4, 8)
    found = schedule.simulate(backward_weight=2)
    rows = outcome.rows
    assert ["time, each stage as soon as it can", f"{found.time:g}"] in rows
    assert ["bubble", f"{100 * found.bubble:.1f} %"] in rows
    assert ["stash of each stage, microbatches of a chunk", "4"] in rows
    assert ["messages that each stage sends", "8 16 16 8"] in rows
    assert js.schedules.grid(schedule) in "\n".join(map(str.rstrip, outcome.out.splitlines()))
    together = schedule.simulate(backward_weight=2, lockstep=True)
    both = [f"{100 * one.bubble:.1f} %" for one in (found, together)]
    assert ["zero_bubble (H1)", "1", *both, "4", "16"] in rows
    assert [row[0] for row in rows[-7:]] == [
        *("gpipe", "one_f_one_b", "interleaved", "zero_bubble (H1)", "zero_bubble (H2)", "zbv"),
        "lockstep",
    ]


def test_lockstep_and_kinds_that_do_not_exist(call):
    outcome = call(
        "inspect", "schedule", "one_f_one_b", "--stages", 4, "--microbatches", 6, "--lockstep",
        "--most-stash", 7,
    )  # fmt: skip
    assert outcome.code == 2
    outcome = call(
        "inspect", "schedule", "lockstep", "--stages", 4, "--microbatches", 6, "--lockstep",
        "--most-stash", 3,
    )  # fmt: skip
    schedule = js.schedules.lockstep(4, 6, most_stash=3)
    assert ["time, in lockstep", f"{schedule.simulate(lockstep=True).time:g}"] in outcome.rows
    assert ["interleaved", *["none"] * 5] in outcome.rows


def test_a_forward_pass_alone(call):
    out = call("inspect", "schedule", "interleaved", *SIZES, "--chunks", 2, "--forward-only").out
    assert "chunk, operation, microbatch: F forward; . idle" in out
    assert "1F7" in out
    assert "I0" not in out


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_lines_are_as_narrow_as_the_terminal(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    asked = ("inspect", "schedule", "zero_bubble", "--stages", 4, "--microbatches", 16)
    out = call(*asked).out
    lines = [line for line in out.splitlines() if re.match(r"\d \|", line)]
    assert all(len(line) <= columns for line in lines)
    assert len(lines) % 4 == 0
    shown = re.search(r"ticks \d+ to \d+ are not shown", out)
    assert bool(shown) == (columns == 30)
    assert "not shown" not in call(*asked, "--whole").out


def test_json_and_orders(call):
    facts = json.loads(call("inspect", "schedule", "zbv", *SIZES, "--json").out)
    schedule = js.schedules.zbv(4, 8)
    assert facts["orders"] == schedule.orders()
    assert facts["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert facts["bubble"] == schedule.simulate().bubble
    assert facts["lockstep_time"] == schedule.simulate(lockstep=True).time
    assert facts["kinds"]["one_f_one_b"]["stash"] == [4, 3, 2, 1]
    out = call("inspect", "schedule", "zbv", *SIZES, "--orders").out
    assert out.splitlines() == schedule.orders()


def test_a_table_from_a_file(call, tmp_path):
    orders = js.schedules.zbv(3, 4).orders()
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(orders) + "\n")
    outcome = call("inspect", "schedule", "--table", file)
    assert outcome.out.startswith("mine: 3 stages, 4 microbatches, 2 chunks")
    assert "Kinds with" not in outcome.out
    assert call("inspect", "schedule", "--table", file, "--orders").out.splitlines() == orders


def test_a_picture(call, tmp_path):
    path = tmp_path / "schedule.png"
    outcome = call("inspect", "schedule", "interleaved", *SIZES, "--chunks", 2, "--out", path)
    assert outcome.out.splitlines()[-1].endswith("schedule.png")
    assert path.read_bytes().startswith(b"\x89PNG")
