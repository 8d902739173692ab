"""A replica that spans processes: `jaxslowmo train` with fewer replicas than processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import quick, small_text

STEPS, SAVED = 6, 3
TRAIN = (
    *("train", "--preset", "tiny", "--replicas", "2", "--devices-per-replica", "2"),
    *("--batch", "4", "--algorithm", "slowmo", "--sync-every", "2", "--slow-every", "4"),
    *("--steps", str(STEPS), "--checkpoint-every", str(SAVED), "--log-every", "1"),
    *("--eval-every", str(STEPS), "--eval-batches", "1", "--resume"),
)


def trained(out: Path, text: Path, processes: int) -> list[float]:
    """The losses of the steps, and the last validation loss."""
    launch = ("launch", "--processes", str(processes), "--") if processes > 1 else ()
    subprocess.run(
        [sys.executable, "-m", "jaxslowmo", *launch, *TRAIN, "--data", text, "--out", out],
        env=os.environ | quick(out.parent / "programs"),
        stdout=subprocess.DEVNULL,
        timeout=150,
        check=True,
    )
    return losses(out)


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert list(by_step) == list(range(1, STEPS + 1))
    return [*by_step.values(), records[-1]["validation_loss"]]


def test_losses_are_those_of_one_process_and_a_resumed_run_is_the_same(tmp_path):
    text = small_text(tmp_path / "text")
    one = trained(tmp_path / "one", text, 1)
    out = tmp_path / "several"
    several = trained(out, text, 4)
    assert several == pytest.approx(one, rel=1e-6)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["placement"] == "2 replicas of 2 devices on 4 of 4 CPU devices of 4 processes"
    # As if it had been lost after the first checkpoint.
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    assert trained(out, text, 4) == several
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "resumed" in record] == [SAVED]
