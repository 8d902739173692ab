"""What `jaxslowmo launch` starts again, says once and ends; tests/cluster shows that it trains."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from cli.commands import words
from jaxslowmo.cli._supervise import Children, launch
from support.fake_children import ended_together, pids_with
from support.waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize(
    ("script", "code", "starts"), [("exit 0", 0, 1), ("exit 1", 1, 1), ("kill -KILL $$", 137, 3)]
)
def test_which_ends_of_processes_are_followed_by_a_start(
    fake, monkeypatch, tmp_path, capsys, script, code, starts
):
    monkeypatch.setattr(Children, "pause", lambda self, seconds: None)
    child = fake(script)
    assert launch(2, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == code
    given = child.starts()
    assert len(given) == 2 * starts
    assert [("--resume" in line) for line in given] == [False] * 2 + [True] * (2 * starts - 2)
    assert {line.split("--process-id ")[1].split()[0] for line in given} == {"0", "1"}
    assert all("--num-processes 2" in line for line in given)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (starts if starts > 1 else 0)
    assert all(line.startswith("launch: process ") for line in lines)
    assert all(" was killed by SIGKILL; no checkpoint in " in line for line in lines)


def test_what_several_processes_say_is_told_once(fake, tmp_path, capfd):
    said = ("error: no text", "error: process 0 has ended: no text", "warning: slow", "more")
    child = fake("".join(f"echo '{line}' >&2; " for line in said) + "exit 2")
    assert launch(3, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == 2
    assert len(child.starts()) == 3
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["error: no text", "more", "more", "more", "warning: slow"]


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


def test_a_process_that_waits_alone_for_the_others_says_so(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"--coordinator 127.0.0.1:{port} --num-processes 2 --process-id 1"
    own = words("train", place, {"startup_timeout": 1}, "--out", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "jaxslowmo", *own],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    line = "error: not all processes came together within 1 s (startup_timeout)\n"
    assert (done.returncode, done.stderr) == (75, line)
