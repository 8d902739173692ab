"""When a run is started again: after which ends, how often, after which waits, with what.

`keep_running` alone, then with a child process (`supervise`): a program stands for the command.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from jaxslowmo.cli import _supervise
from jaxslowmo.cli._supervise import Children, EndOfStart, keep_running, supervise
from support.waiting import PATIENCE_SECONDS, wait_until

LOST = EndOfStart(75, "process 1 died")
DONE = EndOfStart(0, "", is_reported=True)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between starts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr(Children, "pause", lambda self, seconds: found.append(seconds))
    return found


@pytest.fixture
def out(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def run(out, *ends, restarts=100, argv=("train",)) -> tuple[int, list[list[str]]]:
    """The code, and the arguments of every start; an end may be a function that returns it."""
    given: list[list[str]] = []
    left: list[Any] = list(ends)

    def attempt(children, arguments) -> EndOfStart:
        given.append(arguments)
        end = left.pop(0)
        return end if isinstance(end, EndOfStart) else end()

    code = keep_running(attempt, argv, out, restarts=restarts, speaker="error")
    assert not left
    return code, given


def moves(out, step=None, saves=None):
    """An end of a start that recorded and saved these steps."""

    def end():
        if step is not None:
            (out / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        if saves is not None:
            (out / "checkpoints" / str(saves)).mkdir()
        return LOST

    return end


def test_waits_double_up_to_a_minute_and_begin_anew_after_a_checkpoint(out, waits):
    ends = [*(moves(out, step) for step in range(8)), moves(out, 8, saves=8), moves(out, 9), DONE]
    code, given = run(out, *ends, restarts=8)
    assert code == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]
    assert given == [["train"], *[["train", "--resume"]] * 10]


def test_the_count_is_of_starts_without_a_newer_checkpoint(out, waits, capsys):
    ends = [moves(out, saves=step) for step in (5, 10)]
    assert run(out, *ends, LOST, LOST, restarts=2)[0] == 75
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"error: process 1 died; the last saved step is 5, in {out}/checkpoi")
    assert [line.rpartition("; ")[2] for line in said] == [
        "starting again in 1 s (restarts left: 1)",
        "starting again in 1 s (restarts left: 1)",
        "starting again in 2 s (restarts left: 0)",
        "no restarts left",
    ]


def test_five_failures_in_a_row_at_one_step_are_enough(out, waits, capsys):
    """Failures at other steps and late processes do not count."""
    late = EndOfStart(75, "not all processes came together", is_late=True)
    further = [moves(out, step) for step in (3, 4)]
    code, given = run(out, *[LOST] * 4, *[late] * 9, *further, *[LOST] * 4)
    assert (code, len(given)) == (75, 19)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("; not started again after 5 failures in a row at step 4")


def test_what_would_only_come_back_is_not_started_again(out, capsys):
    for code in (0, 1, 2, 130, 143):
        assert run(out, EndOfStart(code, "it ended", is_reported=True))[0] == code
        assert capsys.readouterr().err == ""
        assert run(out, EndOfStart(code, "it ended"))[0] == code
        assert capsys.readouterr().err == f"error: it ended; no checkpoint in {out}/checkpoints\n"


@pytest.mark.parametrize(
    ("number", "ended", "code", "is_said"),
    [
        (signal.SIGTERM, LOST, 143, True),
        (signal.SIGTERM, EndOfStart(1, "ended", is_reported=True), 1, False),
        (signal.SIGINT, EndOfStart(137, "killed"), 130, False),
    ],
)
def test_nothing_is_started_after_a_signal(out, capsys, number, ended, code, is_said):
    before = signal.getsignal(number)
    assert run(out, lambda: (signal.raise_signal(number), ended)[1])[0] == code
    assert ("error: ended by SIGTERM; no checkpoint" in capsys.readouterr().err) == is_said
    assert signal.getsignal(number) == before


def test_a_signal_ends_the_wait_for_the_next_start(out, monkeypatch, capsys):
    monkeypatch.setattr(_supervise, "_FIRST_WAIT", 1000)

    def attempt():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return LOST

    assert run(out, attempt)[0] == 143
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("; starting again in 1000 s (restarts left: 99)")
    assert len(lines) == 2


def test_an_old_run_is_overwritten_once_and_resume_is_given_once(out, waits):
    """A start that failed before it had deleted the old run must not go on with it."""
    moves(out, saves=30)()
    argv = ("train", "--overwrite", "--steps", "5")

    def overwrites():
        shutil.rmtree(out / "checkpoints" / "30")
        moves(out, saves=30)()
        # A new folder may get the number of the old one, but not its time.
        os.utime(out / "checkpoints" / "30", ns=(1, 1))
        return LOST

    _, given = run(out, LOST, overwrites, LOST, DONE, argv=argv)
    assert given == [[*argv]] * 2 + [["train", "--steps", "5", "--resume"]] * 2
    assert run(out, LOST, DONE, argv=("train", "--resume"))[1] == [["train", "--resume"]] * 2


def test_the_second_ctrl_c_kills_and_is_told_before_sigterm(fake, tmp_path):
    child = fake("trap '' TERM; echo > $0.ready; exec sleep 1000")

    with Children(tmp_path) as children:

        def send() -> None:
            wait_until(lambda: child.lines("ready"))
            for number, told in (("TERM", "TERM"), ("INT", "INT"), ("TERM", "INT")):
                os.kill(os.getpid(), signal.Signals[f"SIG{number}"])
                wait_until(lambda told=told: children.received == signal.Signals[f"SIG{told}"])
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=send)
        thread.start()
        end = children.run({"process 3": []}, 0.0)
        thread.join()
    assert (end.code, end.what) == (137, "process 3 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("script", "code", "starts", "words"),
    [
        ("exit 0", 0, 1, ""),
        ("kill -TERM $$", 143, 1, "error: this process was killed by SIGTERM; no checkpoint in "),
        ("kill -KILL $$", 137, 3, "error: this process was killed by SIGKILL; no checkpoint in "),
        ("kill -ABRT $$", 75, 3, "error: another process died or cannot be reached; no check"),
        ("exit 76", 75, 3, "error: too late; no checkpoint in "),
    ],
)
def test_which_ends_of_the_child_are_followed_by_a_start(
    fake, waits, tmp_path, capsys, script, code, starts, words
):
    child = fake(f'echo "$JAXSLOWMO_CHILD $PPID" >> "$0.pids"; {script}')
    assert supervise(["train"], tmp_path, restarts=2) == code
    assert [line.split()[2:] for line in child.starts()] == [
        ["train", *(["--resume"] if i else [])] for i in range(starts)
    ]
    assert {*child.lines("pids")} == {f"{os.getpid()} {os.getpid()}"}  # whose child it is
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (starts if words else 0)
    assert all(line.startswith(words) for line in lines)


def test_a_child_ends_with_its_parent():
    gone = subprocess.Popen(["true"])
    gone.wait()
    asks = (
        "import os, sys\n"
        "from jaxslowmo.cli._supervise import end_with_parent\n"
        "for parent in (os.getppid(), int(sys.argv[1])):\n"
        "    end_with_parent(parent)\n"
        "    print('goes on', flush=True)"
    )
    command = [sys.executable, "-c", asks, str(gone.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout) == (137, "goes on\n"), done.stderr
