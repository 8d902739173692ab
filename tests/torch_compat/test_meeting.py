"""A barrier that knows who is missing, and whether it will come."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.waiting import PATIENCE_SECONDS
from torch_compat import meeting
from torch_compat.errors import PeerLostError
from torch_compat.meeting import Meeting


def in_threads(functions) -> list:
    """What the functions returned, or raised, in a pool as torch_xla has it."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]


def test_who_is_late_is_waited_for_and_named(monkeypatch):
    monkeypatch.setattr(meeting, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "_POLL_SECONDS", 0.05)
    place, said = Meeting(2), threading.Event()

    def late():
        place.introduce(1)
        assert said.wait(PATIENCE_SECONDS)
        place.wait(1)

    def early():
        place.introduce(0)
        place.wait(0)

    messages = []

    def warn(message, *values):
        messages.append(message % values)
        said.set()

    monkeypatch.setattr(meeting._log, "warning", warn)
    assert in_threads([early, late]) == [None, None]
    assert "process 0 has waited" in messages[0]
    assert "for process 1 of 2" in messages[0]


def calling(module: str, function):
    """`function`, called by a function of that module."""
    space = {"__name__": module, "function": function}
    exec("def call():\n    function()", space)
    return space["call"]


@pytest.mark.parametrize("introduced", [True, False])
def test_who_has_raised_or_returned_will_not_come(introduced):
    place = Meeting(2)

    def failing():
        if introduced:
            place.introduce(1)
        raise ValueError("bad sample")

    if not introduced:
        failing = calling("torch_xla._internal.pjrt", failing)

    def waiting():
        place.introduce(0)
        place.wait(0)

    lost, error = in_threads([waiting, failing])
    assert isinstance(lost, PeerLostError)
    assert "Process 1 of 2 will not take part" in str(lost)
    assert "ValueError('bad sample')" in str(lost)
    assert lost.__cause__ is error
    lost, _ = in_threads([waiting, lambda: place.introduce(1)])
    assert isinstance(lost, PeerLostError)
    assert "has returned" in str(lost)


def test_waiting_ends(monkeypatch):
    monkeypatch.setattr(meeting, "LIMIT_SECONDS", 0.2)
    place, over = Meeting(2), threading.Event()

    def stuck():
        place.introduce(1)
        over.wait(PATIENCE_SECONDS)

    def waiting():
        place.introduce(0)
        try:
            place.wait(0)
        finally:
            over.set()

    lost, _ = in_threads([waiting, stuck])
    assert "Process 1 of 2 has not come to this exchange for" in str(lost)
