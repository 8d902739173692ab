"""A replica that spans processes: `jaxslowmo train` with fewer replicas than processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kills import quick

STEPS, SAVED = 6, 3
TRAIN = (
    *("train", "--preset", "tiny", "--replicas", "2", "--devices-per-replica", "2"),
    *("--batch", "4", "--algorithm", "slowmo", "--sync-every", "2", "--slow-every", "4"),
    *("--steps", str(STEPS), "--checkpoint-every", str(SAVED), "--log-every", "1"),
    *("--eval-every", str(STEPS), "--eval-batches", "1", "--resume"),
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(out, processes)`: the losses of the steps, and the last validation loss."""
    folder = tmp_path_factory.mktemp("spread")
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 60)

    def run(name: str, processes: int) -> list[float]:
        out = folder / name
        launch = ("launch", "--processes", str(processes), "--") if processes > 1 else ()
        subprocess.run(
            [sys.executable, "-m", "jaxslowmo", *launch, *TRAIN, "--data", text, "--out", out],
            env=os.environ | quick(folder / "programs"),
            stdout=subprocess.DEVNULL,
            timeout=150,
            check=True,
        )
        return losses(out)

    run.folder = folder
    return run


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert list(by_step) == list(range(1, STEPS + 1))
    return [*by_step.values(), records[-1]["validation_loss"]]


def test_losses_are_those_of_one_process_and_a_resumed_run_is_the_same(train):
    one = train("one", 1)
    several = train("several", 4)
    assert several == pytest.approx(one, rel=1e-6)
    out = train.folder / "several"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["placement"] == ("2 replicas of 2 devices on 4 of 4 CPU devices of 4 processes")
    # As if it had been lost after the first checkpoint.
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    assert train("several", 4) == several
    resumed = [
        line for line in (out / "metrics.jsonl").read_text().splitlines() if "resumed" in line
    ]
    assert [json.loads(line)["step"] for line in resumed] == [SAVED]
