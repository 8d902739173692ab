"""`examples/jobs/mpirun.sh` trains in processes that find each other through Open MPI."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import missing_mpirun
from small_runs import quick, small_text

SCRIPT = Path(__file__).parents[2] / "examples" / "jobs" / "mpirun.sh"
PROCESSES = 4
# An average and a slow step among four; the smallest evaluation.
OPTIONS = (
    *("--preset", "tiny", "--batch", "2", "--steps", "4", "--sync-every", "2", "--slow-every", "4"),
    *("--log-every", "1", "--eval-every", "4", "--eval-batches", "1", "--checkpoint-every", "0"),
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
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert list(by_step) == [1, 2, 3, 4]
    return [*by_step.values(), records[-1]["validation_loss"]]


def test_losses_are_those_of_one_process(tmp_path):
    if lacks := missing_mpirun():
        pytest.fail(f"not run, and not passed: missing here: {', '.join(lacks)}", pytrace=False)
    options = (*OPTIONS, "--data", str(small_text(tmp_path / "text")))
    several, one = tmp_path / "several", tmp_path / "one"
    settings = {"PROCESSES": str(PROCESSES), "PYTHON": sys.executable, "OUT": str(several)}
    settings |= quick(tmp_path / "programs")
    ended_well(["bash", str(SCRIPT), *options], 400, **settings)
    summary = json.loads((several / "summary.json").read_text())
    assert summary["placement"] == "4 replicas on 4 of 4 CPU devices of 4 processes"
    alone = ["-m", "jaxslowmo", "train", "--replicas", str(PROCESSES), "--out", str(one)]
    ended_well([sys.executable, *alone, *options], 200, **quick(tmp_path / "programs"))
    assert losses(several) == pytest.approx(losses(one), rel=1e-6)
