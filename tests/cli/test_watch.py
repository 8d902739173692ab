"""What the watching thread makes of notes, of SIGTERM and of time without progress."""

import json
import os
import threading
import time
import types

import pytest

from jaxslowmo._support.coordinator import NoNoteError
from jaxslowmo.cli import _watch
from jaxslowmo.cli._watch import Watch, propagate_failures
from support.waiting import wait_until


class EndOfStart(SystemExit):
    """In place of the process's end."""


@pytest.fixture
def notes(monkeypatch):
    """The notes at a coordinator, of which this process is the only reader."""
    found = {}

    def wait_for_note(key, seconds):
        if key in found:
            return found[key]
        raise NoNoteError(key)

    monkeypatch.setattr(_watch, "read_note", found.get)
    monkeypatch.setattr(_watch, "write_note", lambda key, text: found.setdefault(key, text) == text)
    monkeypatch.setattr(_watch, "wait_for_note", wait_for_note)
    monkeypatch.setattr(_watch, "_LOOK_SECONDS", 0.01)
    return found


@pytest.fixture
def ends(monkeypatch):
    """The codes with which the process would have ended."""
    codes = []

    def end(code):
        codes.append(code)
        raise EndOfStart

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return codes


def watch(index=1, stall=0, saved="the last saved step is 30"):
    return Watch(index, 2, stall, lambda: saved)


def test_another_process_that_failed_ends_this_one_with_its_code(notes, ends, capfd):
    with watch():
        time.sleep(0.1)
        assert ends == []
        notes[_watch._FAILED] = json.dumps([0, 75, "No space left on device"])
        wait_until(lambda: ends)
    assert ends == [75]
    assert capfd.readouterr().err == "error: process 0 has ended: No space left on device\n"
    assert "jaxslowmo/seen/1" in notes


def test_an_exchange_that_fails_since_another_has_failed_ends_it_with_that_code(
    notes, ends, capfd, monkeypatch
):
    """The exchange may fail before the thread has looked."""
    monkeypatch.setattr(_watch, "_LOOK_SECONDS", 100)
    notes[_watch._FAILED] = json.dumps([1, 1, "KeyError: 'missing'"])
    with pytest.raises(EndOfStart), propagate_failures(watch(index=0)):
        raise ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
    assert ends == [1]
    assert capfd.readouterr().err == "error: process 1 has ended: KeyError: 'missing'\n"


@pytest.fixture
def clock(notes, monkeypatch):
    """`clock(seconds)` lets time pass between two looks of the watching thread."""
    now, looks = [0.0], []

    def read_note(key):
        looks.append(key)
        return notes.get(key)

    def look():
        # A whole one: that which is under way may have begun before.
        end = len(looks) + 4
        wait_until(
            lambda: len(looks) >= end or all(x.name != "watch" for x in threading.enumerate())
        )

    def passes(seconds):
        look()
        now[0] += seconds
        look()

    monkeypatch.setattr(_watch, "read_note", read_note)
    # Of the process, too, whose seconds are progress of a save that compresses.
    fake = types.SimpleNamespace(
        monotonic=lambda: now[0], process_time=lambda: 0.0, sleep=time.sleep
    )
    monkeypatch.setattr(_watch, "time", fake)
    return passes


def test_sigterm_without_progress_ends_it_and_names_the_last_checkpoint(notes, ends, capfd, clock):
    with watch() as own:
        own.step_done()
        clock(9)
        assert ends == []  # nobody has asked
        notes["RECEIVED_PREEMPTION_NOTICE"] = "2026-01-01"
        wait_until(lambda: ends)
    assert ends == [143]
    assert capfd.readouterr().err == (
        "error: asked to stop, and nothing has advanced for 9 s; the last saved step is 30\n"
    )
    assert json.loads(notes[_watch._FAILED])[:2] == [1, 143]  # the others end alike


def test_without_progress_for_longer_than_the_limit_all_end(ends, capfd, clock):
    with watch(stall=1800) as own:
        for _ in range(30):
            own.step_done()
            clock(100)
        assert ends == []
        clock(1701)
    assert ends == [75]
    assert "nothing has advanced for 1801 s (stall_timeout); the last" in capfd.readouterr().err
