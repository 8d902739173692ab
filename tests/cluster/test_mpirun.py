"""`examples/jobs/mpirun.sh` trains in processes that find each other through Open MPI."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import LIGHT, LIGHT_FILE, quick, small_text

SCRIPT = Path(__file__).parents[2] / "examples" / "jobs" / "mpirun.sh"
PROCESSES, STEPS = 4, 6
# Averages, and a slow step; the smallest evaluation.
OPTIONS = (
    *LIGHT,
    *("--preset", "tiny", "--replicas", "2", "--mesh", "device=2", "--batch", "4"),
    *("--sync-every", "2", "--slow-every", "4", "--steps", str(STEPS), "--log-every", "1"),
    *("--eval-every", str(STEPS)),
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


def test_losses_are_those_of_one_process(tmp_path, programs):
    """With two replicas, each of which spans two processes."""
    (tmp_path / "options.json").write_text(json.dumps({**LIGHT_FILE, "eval_batches": 1}))
    options = (*OPTIONS, "--config", str(tmp_path / "options.json"))
    options = (*options, "--data", str(small_text(tmp_path / "text")))
    several, one = tmp_path / "several", tmp_path / "one"
    mpirun = {"PROCESSES": str(PROCESSES), "PYTHON": sys.executable, "OUT": str(several)}
    ended_well(["bash", str(SCRIPT), *options], 400, **quick(programs), **mpirun)
    summary = json.loads((several / "summary.json").read_text())
    assert summary["placement"] == "2 replicas of 2 devices on 4 of 4 CPU devices of 4 processes"
    train = [sys.executable, "-m", "jaxslowmo", "train", "--out", str(one), *options]
    ended_well(train, 200, **quick(programs))
    assert losses(several) == pytest.approx(losses(one), rel=1e-6)
