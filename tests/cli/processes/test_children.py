"""Processes that a command starts, and the signals that reach them whenever they come."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxslowmo.cli.processes._restarts import Children
from support.waiting import PATIENCE_SECONDS

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]
# Says when nothing but SIGKILL ends it any more.
IGNORES = [
    sys.executable,
    "-c",
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "time.sleep(1000)",
]


@pytest.fixture
def start():
    """Starts a process that does not outlive the test."""
    started = []

    def start(children: Children, command: list[str], **options) -> subprocess.Popen:
        started.append(children.start(command, os.environ, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_as_sigterm(start, number):
    with Children() as children:
        processes = [start(children, SLEEPS) for _ in range(2)]
        assert children.received is None
        signal.raise_signal(number)
        assert [process.wait(PATIENCE_SECONDS) for process in processes] == [-signal.SIGTERM] * 2
        assert children.received == number


def test_a_signal_reaches_the_process_that_is_being_started(start, monkeypatch):
    class Slow(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            signal.raise_signal(signal.SIGTERM)  # before anybody has it

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with Children() as children:
        assert start(children, SLEEPS).wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_the_second_ctrl_c_kills_and_is_told_before_sigterm(start):
    with Children() as children:
        process = start(children, IGNORES, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert process.poll() is None
        assert children.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_signal_ends_a_pause():
    with Children() as children:
        children.pause(0.01)
        assert children.received is None
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        begin = time.monotonic()
        children.pause(1000)
        assert time.monotonic() - begin < PATIENCE_SECONDS
        timer.join()
