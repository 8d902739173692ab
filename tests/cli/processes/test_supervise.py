"""What the parent of a process tells of the others, and does with its child."""

import os
import signal
import subprocess
import sys

import pytest

from jaxslowmo.cli._app import run
from jaxslowmo.cli.processes._peers import CHILD
from jaxslowmo.cli.processes._restarts import Children
from jaxslowmo.cli.processes._supervise import describe_loss, supervise
from support.fake_children import Fake, ended_together
from support.waiting import PATIENCE_SECONDS, wait_until

# As jaxlib 0.10 and 0.12 print it.
FATAL = (
    "F1121 15:10:32.612967    8864 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died"
)
SILENT = f"{FATAL} absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], None),
        (["Traceback (most recent call last):", "ValueError: no"], None),
        ([SILENT, "2", "The tasks have crashed."], "process 2 died or cannot be reached"),
        ([SILENT, "3, 1", ""], "processes 1 and 3 died or cannot be reached"),
        (
            [f"{FATAL} ABORTED: 1 unexpectedly tried to connect with a different incarnation."],
            "process 1 died or cannot be reached",
        ),
        ([SILENT, "0"], "process 0 (the coordinator) died or cannot be reached"),
        (
            [f"{FATAL} DEADLINE_EXCEEDED", "", "RPC: /xla.coordination.CoordinationService/Heartb"],
            "process 0 (the coordinator) died or cannot be reached",
        ),
        (
            [FATAL, "", "RPC: /xla.coordination.CoordinationService/RegisterTask"],
            "not all processes came together within --startup-timeout",
        ),
    ],
)
def test_what_the_runtime_says_of_a_lost_process(lines, words):
    assert describe_loss(lines) == words


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(Children, "pause", lambda self, seconds: found.append(seconds))
    return found


@pytest.mark.parametrize(
    ("script", "code", "starts", "words"),
    [
        ("exit 0", 0, 1, ""),
        ("exit 1", 1, 1, ""),
        ("exit 2", 2, 1, ""),
        ("exit 143", 143, 1, ""),
        ("kill -TERM $$", 143, 1, "error: this process was killed by SIGTERM; no checkpoint in "),
        ("kill -KILL $$", 137, 3, "error: this process was killed by SIGKILL; no checkpoint in "),
        ("kill -40 $$", 168, 3, "error: this process was killed by signal 40; no checkpoint in "),
        ("exit 75", 75, 3, "error: this process ended with code 75; no checkpoint in "),
        (
            "echo 'jaxslowmo: an exchange with the other processes failed' >&2; exit 1",
            75,
            3,
            "error: another process died or cannot be reached; no checkpoint in ",
        ),
        # It heard why while it waited, and says so itself.
        (
            "echo 'jaxslowmo: an exchange with the other processes failed' >&2;"
            "echo 'error: process 1 has ended: KeyError' >&2; exit 1",
            1,
            1,
            "error: process 1 has ended: KeyError",
        ),
    ],
)
def test_which_ends_of_the_child_are_followed_by_a_start(
    fake, waits, tmp_path, capsys, script, code, starts, words
):
    child = fake(script)
    assert supervise(["train"], tmp_path, restarts=2) == code
    assert [line.split()[2:] for line in child.starts()] == [
        ["train", *(["--resume"] if i else [])] for i in range(starts)
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (starts if words else 0)
    assert all(line.startswith(words) for line in lines)


def test_who_says_why_he_ends_with_75_needs_no_second_line(fake, tmp_path, capsys):
    fake("echo 'error: No space left on device' >&2; exit 75")
    assert supervise(["train"], tmp_path) == 75
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_a_run_does_not_need_a_reader_of_what_it_says(fake, waits, tmp_path, monkeypatch):
    """As where a terminal is gone: the child is read to its end, and started again."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    child = fake("for i in 1 2 3 4 5; do echo line >&2; sleep 0.1; done; exit 75")
    monkeypatch.setattr(sys, "stderr", Gone())
    assert supervise(["train"], tmp_path, restarts=2) == 75
    assert len(child.starts()) == 3


def test_the_child_hears_whose_child_it_is(fake, tmp_path):
    child = fake('echo "$JAXSLOWMO_CHILD $PPID" >> "$0.pids"')
    assert supervise(["train"], tmp_path) == 0
    given, real = child.lines("pids")[0].split()
    assert given == real == str(os.getpid())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_at_the_start_is_not_followed_by_a_restart(tmp_path, number, code):
    child = Fake(tmp_path / "fake", "exec sleep 100")
    run = subprocess.Popen(
        [sys.executable, "-c", PARENT, child.path, tmp_path], stderr=subprocess.PIPE, text=True
    )
    with ended_together(run):
        wait_until(lambda: child.starts())
        run.send_signal(number)
        _, said = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == code
    assert len(child.starts()) == 1
    assert said.startswith("error: ended by SIGTERM; no checkpoint in " if code == 143 else "")
    assert said.count("\n") == (code == 143)


# A process of its own: pytest has handlers, too.
PARENT = """
import sys
from pathlib import Path
from jaxslowmo.cli.processes._supervise import supervise
sys.executable = sys.argv[1]
sys.exit(supervise(["train"], Path(sys.argv[2]), restarts=3))
"""


def test_who_asks_late_for_its_end_with_its_parent_ends_when_that_is_gone():
    gone = subprocess.Popen(["true"])
    gone.wait()
    asks = (
        "import sys\n"
        "from jaxslowmo.cli.processes._supervise import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "print('goes on')"
    )
    for parent, code, said in [(gone.pid, 137, ""), (os.getpid(), 0, "goes on\n")]:
        done = subprocess.run(
            [sys.executable, "-c", asks, str(parent)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_ctrl_c_reaches_a_child_through_its_parent_alone(monkeypatch):
    """In the start, too: both are in the terminal's group of processes."""
    found = []

    def train(*_):
        found.append(signal.getsignal(signal.SIGINT))
        return 0

    monkeypatch.setattr("jaxslowmo.cli._train.train", train)
    monkeypatch.setattr("jaxslowmo.cli._app.end_with_parent", lambda parent: None)
    monkeypatch.setenv(CHILD, str(os.getpid()))
    before = signal.getsignal(signal.SIGINT)
    try:
        assert run(["train"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN]
