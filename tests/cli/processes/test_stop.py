"""Signals that only ask for an end."""

import signal

import pytest

from jaxslowmo.cli.processes._launchers import Cluster
from jaxslowmo.cli.processes._stop import StopOnSignal, handling


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_the_first_signal_asks_and_the_second_ctrl_c_raises():
    before = handlers()
    with StopOnSignal() as stop:
        assert stop.after(1) is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.after(2) == "preempted"
        signal.raise_signal(signal.SIGINT)
        assert stop.after(3) == "interrupted"
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_with_other_processes_signals_are_left_to_the_runtime_and_the_parent():
    before = handlers()
    with StopOnSignal(Cluster(0, 2)) as stop:
        assert handlers() == [signal.SIG_IGN, before[1]]
        assert stop.asked is None
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
