"""`examples/jobs/mpirun.sh` trains in processes that find each other through Open MPI."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import LIGHT, quick, small_text

SCRIPT = Path(__file__).parents[2] / "examples" / "jobs" / "mpirun.sh"
PROCESSES, STEPS, SAVED = 4, 6, 3
# Averages, and a slow step; the smallest evaluation.
OPTIONS = (
    *LIGHT,
    *("--preset", "tiny", "--replicas", "2", "--devices-per-replica", "2", "--batch", "4"),
    *("--sync-every", "2", "--slow-every", "4", "--steps", str(STEPS), "--log-every", "1"),
    *("--eval-every", str(STEPS), "--eval-batches", "1", "--checkpoint-every", str(SAVED)),
)
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "TERM": "dumb",  # processes of mpirun have a terminal
}


def ended_well(command: list[str], seconds: float, **environment: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    process = subprocess.Popen(
        command,
        env=own | ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except BaseException:
        # mpirun takes its processes, which are in groups of their own, with it.
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=90)
        raise
    assert process.returncode == 0, said[-4000:]


def losses(out: Path) -> list[float]:
    """Of every step, and the last one on the held-out text."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert list(by_step) == list(range(1, STEPS + 1))
    return [*by_step.values(), records[-1]["validation_loss"]]


def test_losses_are_those_of_one_process_and_a_resumed_run_is_the_same(tmp_path):
    """With two replicas, each of which spans two processes."""
    options = (*OPTIONS, "--data", str(small_text(tmp_path / "text")))
    several, one = tmp_path / "several", tmp_path / "one"
    settings = quick(tmp_path / "programs")
    mpirun = {"PROCESSES": str(PROCESSES), "PYTHON": sys.executable, "OUT": str(several)}
    ended_well(["bash", str(SCRIPT), *options], 400, **settings, **mpirun)
    summary = json.loads((several / "summary.json").read_text())
    assert summary["placement"] == "2 replicas of 2 devices on 4 of 4 CPU devices of 4 processes"
    jaxslowmo = [sys.executable, "-m", "jaxslowmo"]
    ended_well([*jaxslowmo, "train", "--out", str(one), *options], 200, **settings)
    found = losses(several)
    assert found == pytest.approx(losses(one), rel=1e-6)

    # As if it had been lost after the first checkpoint.
    shutil.rmtree(several / "checkpoints" / str(STEPS))
    launch = [*jaxslowmo, "launch", "--processes", str(PROCESSES), "--", "train", "--resume"]
    ended_well([*launch, "--out", str(several), *options], 400, **settings)
    assert losses(several) == found
    lines = map(json.loads, (several / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "resumed" in line] == [SAVED]
