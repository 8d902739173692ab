"""`train --islands`: several runs of one model that exchange through a folder."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from cli.commands import QUICK, TINY, json_of, records, trajectory, words
from jaxslowmo.checkpoint import load_consensus
from support.waiting import PATIENCE_SECONDS, wait_until

ISLAND = f"{TINY} --replicas 2 --slow-every 4 --log-every 1 --learning-rate 0.2"


def test_a_dry_run_asks_no_store_and_a_status_needs_a_run(call, text, tmp_path):
    outcome = call("train --dry-run --preset tiny --islands run --island a --codec int8")
    assert (outcome.code, outcome.err) == (0, "")
    assert "average" in outcome.out
    rows = dict(row for row in outcome.rows if len(row) == 2)
    assert rows["part of a round, to the store"] == "12.0 kB"  # of 11,760 parameters
    assert "slow" not in outcome.out.replace("slowmo", "")  # the store's, not the replicas'
    call("islands status run").is_refused("run: there is no run here")
    late = call("train --preset tiny --data", text, "--islands run --island a", {"late": "never"})
    late.is_refused("--late", "never")
    assert not (tmp_path / "run").exists()


def test_an_island_resumes_to_the_bit_and_only_as_itself(call, text, tmp_path):
    def trained(run, out, *options):
        return call(
            ISLAND, QUICK, "--sync-every 2 --codec int8 --eval-every 6 --data", text,
            {"schedule_steps": 12},
            "--islands", tmp_path / run, "--island a --checkpoint-every 6 --out", tmp_path / out,
            *options,
        )  # fmt: skip

    whole = trained("first", "whole", "--steps 12")
    assert (whole.code, whole.err) == (0, "")
    assert " bytes sent to join; 3 rounds, on average " in whole.out
    # All that lies in the store, and the heartbeats that later ones have replaced.
    stored = sum(x.stat().st_size for x in (tmp_path / "first").rglob("*") if x.is_file())
    summary = json_of(tmp_path / "whole" / "summary.json")
    assert stored < summary["bytes_sent"] < stored + 3 * 500
    assert (summary["island"], summary["bytes_are_hypothetical"]) == ("a", False)
    assert trained("second", "parts", "--steps 6").code == 0
    # Its waiting may be other than before.
    outcome = trained("second", "parts", "--steps 12 --resume --quorum 1", {"late": "carry"})
    assert (outcome.code, outcome.err) == (0, "")

    def without_bytes(out):  # who resumes joins again
        return [{k: v for k, v in r.items() if k != "bytes_sent"} for r in trajectory(out)]

    assert without_bytes(tmp_path / "parts") == without_bytes(tmp_path / "whole")
    more = json_of(tmp_path / "parts" / "summary.json")["bytes_sent"] - summary["bytes_sent"]
    assert 0 < more < 1000
    found = trajectory(tmp_path / "whole")
    assert [r["round"] for r in found[1:]] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]

    refused = trained("second", "other", "--steps 8 --slow-momentum 0.3")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "outer_optimizer" in refused.err


@pytest.mark.usefixtures("quick_processes")
def test_two_islands_end_with_one_model_though_one_was_stopped_while_it_waited(
    call, text, tmp_path
):
    run = tmp_path / "run"

    def start(name, *more):
        options = (
            f"{ISLAND} --algorithm diloco --steps 12 --quorum 2 --delay 2 "
            f"--execution virtual --export --data {text} --out {tmp_path / name} "
            f"--islands {run} --island {name}"
        )
        return subprocess.Popen(
            [sys.executable, "-m", "jaxslowmo", *words(options, QUICK), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "100"},
        )

    first = start("a")
    try:
        wait_until(lambda: first.poll() is not None or [*run.glob("rounds/*/part-a-*")])
        first.send_signal(signal.SIGTERM)
        shown, errors = first.communicate(timeout=PATIENCE_SECONDS)
        assert first.returncode == 0, errors
    finally:
        first.kill()
    # With a delay it trains until the exchange is due.
    assert re.search(r"Saved at step [234]\b", shown)

    islands = [start("a", "--resume"), start("b")]
    try:
        for island in islands:
            _, errors = island.communicate(timeout=PATIENCE_SECONDS)
            assert island.returncode == 0, errors
    finally:
        for island in islands:
            island.kill()
    a, b = (load_consensus(tmp_path / name / "model") for name in "ab")
    assert all(np.array_equal(a[key], b[key]) for key in a)
    # From equal parameters, on other batches.
    losses = [{r["step"]: r.get("loss") for r in records(tmp_path / name)} for name in "ab"]
    assert all(losses[0][step] != losses[1][step] for step in range(1, 13))
    status = call("islands status", run)
    assert (status.code, status.err) == (0, "")
    assert "round 3 is open" in status.out
    assert [line.split()[:3] for line in status.out.splitlines()[2:]] == [
        ["a", "3", "0"],
        ["b", "3", "0"],
    ]
