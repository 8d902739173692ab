"""What `jaxslowmo launch` refuses and starts again; that it launches, tests/cluster shows, too."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from jaxslowmo.cli.processes._launch import _free_port, launch
from jaxslowmo.cli.processes._restarts import Children
from support.fake_children import ended_together, pids_with
from support.waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", 2, "--", "compare"], "launch runs: jaxslowmo launch ... -- train ...;"),
        (["--processes", 2], "got nothing"),
        (["--processes", 2, "--", "train"], "train needs --out"),
        (["--processes", 2, "--", "train", "--out="], "--out must be a path, got nothing"),
        (["--processes", 0, "--", "train", "--out", "x"], "--processes must be 1 to 1024, got 0"),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--process-id=1", "--restarts", 2],
            "--process-id, --restarts of train: launch decides it",
        ),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--steps", 0],
            "--steps must be >= 1",
        ),
        (["--processes", 2, "--", "train", "--out", "x", "--stps", 0], "No such option: --stps"),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--graph", "ring"],
            "not with slowmo; got",
        ),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--coordinator-bind", "0.0.0.0"],
            "--coordinator-bind of train: launch decides it",
        ),
        (
            [
                *("--processes", 2, "--", "train", "--out", "x", "--executor", "host"),
                *("--mesh", "replica=2,stage=2", "--batch", 4),
            ],
            "--executor host starts the programs of all stages from a single process, got 2",
        ),
    ],
)
def test_what_cannot_be_launched(call, argv, words):
    outcome = call("launch", *argv)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert words in outcome.err


@pytest.mark.parametrize(
    ("script", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 1", 1, 1),
        ("exit 143", 143, 1),
        ("kill -KILL $$", 137, 3),
    ],
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
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (starts if starts > 1 else 0)
    assert all(line.startswith("launch: process ") for line in lines)
    assert all(f" ended with code {code}; no checkpoint in " in line for line in lines)


def test_what_several_processes_say_is_told_once(fake, tmp_path, capfd):
    said = ("error: no text", "error: process 0 has ended: no text", "warning: slow", "more")
    child = fake("".join(f"echo '{line}' >&2; " for line in said) + "exit 2")
    assert launch(3, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == 2
    assert len(child.starts()) == 3
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["error: no text", "more", "more", "more", "warning: slow"]


def test_a_signal_between_two_starts_prevents_the_second(fake, monkeypatch, tmp_path, capsys):
    child = fake("exec sleep 100")
    start = Children.start

    def start_and_signal(self, *args, **options):
        process = start(self, *args, **options)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(Children, "start", start_and_signal)
    assert launch(3, 2, 10, ["train", "--out", str(tmp_path)], tmp_path) == 143
    assert len(child.starts()) <= 1  # it may have ended before it wrote
    assert capsys.readouterr().err.startswith("launch: ended by SIGTERM; no checkpoint in ")


def test_the_port_is_kept_for_process_0():
    with _free_port() as port:
        with socket.socket() as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            coordinator.bind(("127.0.0.1", port))
            coordinator.listen()
        if sys.platform == "linux":
            with socket.socket() as another, pytest.raises(OSError, match="in use"):
                another.bind(("127.0.0.1", port))


@pytest.fixture
def launched(tmp_path):
    """A real launch, with nothing compiled yet."""
    out = tmp_path / "out"
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxslowmo", "launch", "--processes", "2", "--restarts", "3"),
            *("--", "train", "--preset", "tiny", "--replicas", "2", "--steps", "1000000"),
            *("--out", str(out)),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended_together(run):
        try:
            yield run, out
        finally:
            for pid in pids_with(out):
                os.kill(pid, signal.SIGKILL)


def test_sigterm_while_processes_start_ends_all(launched):
    run, out = launched
    wait_until(lambda: len(pids_with(out)) == 5)  # with their parents, and the launcher
    run.terminate()
    _, said = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 143, said
    # Of those that had got so far as to have something to say; else of the launcher.
    assert ": ended by SIGTERM; no checkpoint in " in said
    assert "starting again" not in said
    assert not pids_with(out)


@pytest.mark.parametrize("processes", [2, 3], ids=["first child", "second child"])
def test_no_process_outlives_a_launcher_that_is_killed_at_once(launched, processes):
    run, out = launched
    wait_until(lambda: len(pids_with(out)) >= processes)
    run.kill()
    run.communicate(timeout=PATIENCE_SECONDS)
    wait_until(lambda: not pids_with(out))
