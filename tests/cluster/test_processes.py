"""Processes on hosts end together, and nothing waits for ever."""

import sys

import pytest
from processes import ProcessFailed, run, running

SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(100)"]


def test_what_each_prints_is_collected(four_hosts, tmp_path):
    commands = [[sys.executable, "-c", f"print({i})"] for i in range(4)]
    assert run(four_hosts, commands, tmp_path, seconds=300) == [f"{i}\n" for i in range(4)]


def test_one_that_fails_ends_the_others_and_is_quoted(four_hosts, tmp_path):
    fails = [sys.executable, "-c", "import sys; sys.exit('the reason')"]
    with running(four_hosts, [SLEEP, fails], tmp_path) as started:
        with pytest.raises(ProcessFailed, match=r"(?s)process 0: killed.*process 1: 1\nthe reason"):
            started.wait(60)
        assert all(process.poll() is not None for process in started.processes)


def test_too_long_is_a_failure_that_tells_what_was_printed(four_hosts, tmp_path):
    with running(four_hosts, [SLEEP, SLEEP], tmp_path) as started:
        with pytest.raises(ProcessFailed, match=r"(?s)not done after 3 s.*here.*here"):
            started.wait(3)
        assert all(process.poll() is not None for process in started.processes)


def test_what_still_runs_is_ended_after_an_error(four_hosts, tmp_path):
    with pytest.raises(KeyboardInterrupt), running(four_hosts, [SLEEP], tmp_path) as started:
        raise KeyboardInterrupt
    assert [process.poll() for process in started.processes] == [-9]
