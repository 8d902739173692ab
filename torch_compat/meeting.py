"""A barrier for the threads of one process that drive a device each.

It differs from `threading.Barrier` in what it says: who is awaited, and that a thread will never
come since its function has ended, with the exception that ended it.
"""

import gc
import logging
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from types import FrameType

from .errors import PeerLostError, UnlikeCallsError, unlike_calls

_log = logging.getLogger(__name__)

# XLA's CPU runtime aborts a process whose devices wait in a collective for 15 s, so they wait here.
NOTICE_SECONDS = 30.0
LIMIT_SECONDS = 1800.0
_POLL_SECONDS = 0.5
# A thread that has nothing but these on its stack runs nobody's function any more.
_MACHINERY = ("threading", "concurrent.futures.thread", "queue")


class Meeting:
    """Where the threads of devices 0 to `parties` - 1 wait for each other, again and again."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._arrived = threading.Condition()
        self._rounds = [0] * parties
        # Of this round and the next: nobody can be further ahead.
        self._calls = [[""] * parties, [""] * parties]
        self._threads: dict[int, int] = {}

    def introduce(self, index: int) -> None:
        """The calling thread is that of device `index`; so that its end can be seen."""
        self._threads[index] = threading.get_ident()

    def wait(self, index: int, call: str = "an exchange of its own") -> None:
        """Return when all devices have called this as often as device `index` has.

        Args:
          index: the number of the calling device.
          call: what the device does next, which all must say alike.

        Raises:
          UnlikeCallsError: they do not; all devices raise it.
          PeerLostError: a device will not come, since the function that it ran has ended, or has
            not come for half an hour.
        """
        with self._arrived:
            self._rounds[index] += 1
            goal = self._rounds[index]
            calls = self._calls[goal % 2]
            calls[index] = call
            self._arrived.notify_all()
            begin = time.monotonic()
            notice = begin + NOTICE_SECONDS
            while missing := [i for i, round_ in enumerate(self._rounds) if round_ < goal]:
                if self._arrived.wait(_POLL_SECONDS):
                    continue
                self._check(missing, time.monotonic() - begin)
                if time.monotonic() >= notice:
                    notice += NOTICE_SECONDS
                    _log.warning(
                        "process %d has waited %.0f s for process %s of %d to exchange; it may "
                        "evaluate, save or compile",
                        *(index, time.monotonic() - begin, _listed(missing), self.parties),
                    )
            if len(set(calls)) > 1:
                raise UnlikeCallsError(unlike_calls(dict(enumerate(calls))))

    def _check(self, missing: list[int], seconds: float) -> None:
        ended = [i for i in missing if i in self._threads and not _is_busy(self._threads[i])]
        failures = _failures()
        if not ended:
            # Whoever has not been introduced may have failed before; then torch_xla ran it.
            unknown = any(i not in self._threads for i in missing)
            failures = [e for e in failures if unknown and _came_through(e, "torch_xla")]
        if ended or failures:
            raise PeerLostError(
                f"Process {_listed(ended or missing)} of {self.parties} will not take part in this "
                "exchange: its function has "
                f"{'raised ' + repr(failures[-1]) if failures else 'returned'}, and the others "
                "wait. All processes must make the same calls."
            ) from (failures[-1] if failures else None)
        if seconds > LIMIT_SECONDS:
            raise PeerLostError(
                f"Process {_listed(missing)} of {self.parties} has not come to this exchange for "
                f"{seconds:.0f} s. All processes must make the same calls."
            )


def _is_busy(thread: int) -> bool:
    """Whether a thread runs a function other than its pool's."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") not in _MACHINERY:
            return True
        frame = frame.f_back
    return False


def _failures() -> list[BaseException]:
    """What functions of this process' thread pools have raised that nobody has fetched.

    Pools keep that in futures; those who could fetch it wait for the threads that wait here.
    """
    # By `type`: objects may answer for their `__class__` with code of their own.
    futures = [item for item in gc.get_objects() if issubclass(type(item), Future)]
    ended = [future for future in futures if future.done() and not future.cancelled()]
    found = [future.exception() for future in ended]
    return [e for e in found if e is not None and not isinstance(e, PeerLostError)]


def _came_through(error: BaseException, package: str) -> bool:
    """Whether a function of that package called what raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    return package in names


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
