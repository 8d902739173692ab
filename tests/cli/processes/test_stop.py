"""Signals that only ask for an end."""

import signal

import pytest

from jaxslowmo.cli.processes._peers import Cluster, StopOnSignal, handling
from support.exhaustive import sweep
from support.pairs import two_processes


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_the_first_signal_asks_and_the_second_ctrl_c_raises():
    before = handlers()
    with StopOnSignal() as stop:
        assert stop.after_step() is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.after_step() == "preempted"
        signal.raise_signal(signal.SIGINT)
        assert stop.after_step() == "interrupted"
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_with_other_processes_signals_are_left_to_the_runtime_and_the_parent():
    before = handlers()
    with StopOnSignal(Cluster(0, 2)) as stop:
        assert handlers() == [signal.SIG_IGN, before[1]]
        assert stop.reason is None
    assert handlers() == before


def test_handlers_are_put_back_after_an_error():
    before, got = handlers(), []

    def fail() -> None:
        with handling({signal.SIGTERM: lambda number, frame: got.append(number)}):
            signal.raise_signal(signal.SIGTERM)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (handlers(), got) == (before, [signal.SIGTERM])


PROGRAM = """
import os, signal, time
from jaxslowmo.cli.processes._peers import Cluster
from jaxslowmo.cli.processes._peers import StopOnSignal

with StopOnSignal(Cluster(rank, 2)) as stop:
    for step in range(21, 20_000):  # of a run that goes on after step 20
        if step == 21 + {after} and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        if stop.after_step():
            print(stop.reason, step)
            break
        time.sleep(0.01)
"""


@pytest.mark.parametrize("after", sweep([0, 30], bool))
def test_sigterm_stops_both_at_one_step_of_a_resumed_run(tmp_path, after):
    """Also before its first step; and after a rollback numbers of steps come twice."""
    first, second = two_processes(PROGRAM.format(after=after), tmp_path)
    assert first == second
    assert first.startswith("preempted ")
