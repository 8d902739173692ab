"""Failures that are not deaths: some of `python tests/cluster/failures.py`, once each."""

import os
import subprocess
import sys
import time

import failures
import pytest
from faults import stand as stands
from faults.registry import FAULTS, Fault, Observed, attempt
from faults.stand import Stand
from faults.watching import MARK

# One of every kind.
SOME = (
    "disk full, freed after the first warning",
    "a save hangs where process 1 writes; SIGTERM to trainer 0",
    "exception in process 1, --restarts 3",
    "a process of three is killed",
)


@pytest.mark.parametrize("name", SOME)
def test_it_is_as_promised(name, tmp_path, programs, monkeypatch):
    # The times are promised for a machine that does little else, where `make test-failures` holds
    # them; beside other work it is the end itself that counts.
    monkeypatch.setattr(stands, "SLACK", 10.0)
    observed = attempt(FAULTS[name], tmp_path / "try", programs, seed=0)
    assert observed.broken is None, observed.broken


def test_what_all_wait_for_what_is_left_and_a_broken_promise_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(stands, "_GONE_SECONDS", 1)
    left = []

    def waits(stand: Stand) -> None:
        """A process that waits, marked as a trainer of the try."""
        env = {**os.environ, MARK: stand._mark, "JAXSLOWMO_CHILD": "1"}
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        left.append(subprocess.Popen(command, env=env))
        # Not at once: it starts.
        deadline = time.monotonic() + 120
        while stand.silence < 2 and time.monotonic() < deadline:
            time.sleep(0.1)

    observed = attempt(Fault("", "", waits), tmp_path / "waits", tmp_path, 0)
    assert observed.silence >= 2
    assert "left after 1 s: " in (observed.broken or "")
    assert left[0].wait(120) == -9

    fault = Fault("name", "promise", lambda stand: stand.one("--steps", "0").ends(0))
    observed = attempt(fault, tmp_path / "ends", tmp_path, 0)
    assert "ended with [2] instead of (0,)" in (observed.broken or "")
    assert "error: --steps" in (observed.broken or "")
    told = failures.row(fault, [observed, Observed(None, 3.0, (0,), 2.0)])
    assert told.startswith("| name | promise | 1 of 2; ended within ")
    assert "code 0, 2; silence 2 s" in told
