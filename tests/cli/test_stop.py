"""Signals that only ask for an end, and what ends all processes when one fails."""

import signal
import threading

import jax
import pytest

from jaxslowmo.cli._processes import Cluster, StopOnSignal
from jaxslowmo.cli._watch import is_peer_failure
from support.pairs import two_processes
from support.waiting import PATIENCE_SECONDS


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
    # With other processes signals are left to the runtime and the parent.
    with StopOnSignal(Cluster(0, 2)) as stop:
        assert handlers() == [signal.SIG_IGN, before[1]]
        assert stop.reason is None
    assert handlers() == before


def test_a_signal_just_before_a_wait_ends_it():
    before = signal.getsignal(signal.SIGALRM)
    with StopOnSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        with stop.interruptible_wait():
            assert threading.Event().wait(PATIENCE_SECONDS), "not ended"
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


PART = """
import time
from jaxslowmo.cli._watch import Watch, propagate_failures

with propagate_failures(Watch(rank, 2, 0, lambda: "")):
    time.sleep(0.5 * rank)
print("parted")
"""
STOPS = """
import os, signal, time
from jaxslowmo.cli._processes import Cluster
from jaxslowmo.cli._processes import StopOnSignal

with StopOnSignal(Cluster(rank, 2)) as stop:
    for step in range(21, 20_000):  # of a run that goes on after step 20
        if step == 21 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        if stop.after_step():
            print(stop.reason, step)
            break
        time.sleep(0.01)
"""


def test_sigterm_stops_both_at_one_step_of_a_resumed_run_and_both_part(tmp_path):
    """Also before its first step; and after a rollback numbers of steps come twice."""
    first, second = two_processes(STOPS + PART, tmp_path)
    assert first == second
    assert first.startswith("preempted ")
    assert first.endswith("\nparted\n")


def test_errors_that_a_lost_process_can_have_caused():
    gone = jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: task is set to ERROR")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    gloo = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    saved = RuntimeError("the checkpoint could not be written")
    saved.__cause__ = gone
    found = [
        is_peer_failure(error) for error in (gone, gloo, saved, full, ValueError("--replicas"))
    ]
    assert found == [True, True, True, False, False]


FAILS = """
import time
from jaxslowmo.cli._watch import Watch, propagate_failures

with propagate_failures(Watch(rank, 2, 0, lambda: "")):
    if rank == 0:
        raise OSError(28, 'No space left', 'b')
    time.sleep(1000)
"""


def test_one_that_fails_ends_both_with_its_code(tmp_path):
    """jax's own end would wait for the other, for 300 s."""
    first, second = two_processes(FAILS, tmp_path, seconds=200, code=75)
    line = "No space left on device ([Errno 28] No"
    assert second.startswith(f"error: process 0 has ended: {line}")
    assert len(second.splitlines()) == 1
    assert first.startswith(f"error: {line}")
