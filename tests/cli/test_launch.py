"""What `jaxslowmo launch` starts again, says once and ends; tests/cluster shows that it trains."""

import os
import signal
import subprocess
import sys

from jaxslowmo.cli._supervise import Children, launch
from support.fake_children import ended_together, pids_with
from support.waiting import PATIENCE_SECONDS, wait_until


def test_a_process_that_is_killed_is_followed_by_a_start_of_all(
    fake, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(Children, "pause", lambda self, seconds: None)
    child = fake("kill -KILL $$")
    assert launch(2, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == 137
    given = child.starts()
    assert [("--resume" in line) for line in given] == [False] * 2 + [True] * 4
    assert {line.split("--process-id ")[1].split()[0] for line in given} == {"0", "1"}
    assert all("--num-processes 2" in line for line in given)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("launch: process ") for line in lines)
    assert all(" was killed by SIGKILL; no checkpoint in " in line for line in lines)


def test_processes_that_end_well_are_left_alone(fake, tmp_path):
    child = fake("sleep 1")
    assert launch(2, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == 0
    assert len(child.starts()) == 2


def test_no_process_outlives_a_launcher_that_is_killed_while_they_start(tmp_path):
    """A real launch, with nothing compiled yet: two processes and the launcher."""
    out = tmp_path / "out"
    options = "--processes 2 --restarts 3 -- train --preset tiny --replicas 2 --steps 1000000"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "jaxslowmo", "launch", *options.split(), "--out", str(out)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended_together(launcher):
        try:
            wait_until(lambda: len(pids_with(out)) >= 2)
            launcher.kill()
            _, said = launcher.communicate(timeout=PATIENCE_SECONDS)
            wait_until(lambda: not pids_with(out))
        finally:
            for pid in pids_with(out):
                os.kill(pid, signal.SIGKILL)
    assert "starting again" not in said
