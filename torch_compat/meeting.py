"""A barrier for the threads of one process that drive a device each.

Unlike `threading.Barrier` it names the threads that are missing. If the function of a missing
thread has ended, it raises an error with the exception that ended it.
"""

import gc
import logging
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from types import FrameType

from .errors import PeerLostError, UnlikeCallsError, last_exchanges, unlike_calls

_log = logging.getLogger(__name__)

# XLA's CPU runtime aborts a process whose devices wait in a collective for 15 s, so they wait here.
NOTICE_SECONDS = 30.0
LIMIT_SECONDS = 1800.0
_POLL_SECONDS = 0.5
# A thread whose stack has only these modules does not run a user's function any more.
_MACHINERY = ("threading", "concurrent.futures.thread", "queue")


class Meeting:
    """A barrier of the threads of devices 0 to `parties` - 1, which can be used repeatedly."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._arrived = threading.Condition()
        self._rounds = [0] * parties
        # Calls of this round and the next: no device can be further ahead.
        self._calls = [[""] * parties, [""] * parties]
        self._threads: dict[int, int] = {}

    def introduce(self, index: int) -> None:
        """Register the calling thread as that of device `index`, so that its end is noticed."""
        self._threads[index] = threading.get_ident()

    def wait(self, index: int, call: str = "an exchange of its own") -> None:
        """Wait until all devices have called this as often as device `index` has.

        Args:
          index: number of the calling device.
          call: description of what the device does next, which must be equal for all.

        Raises:
          UnlikeCallsError: `call` differs between devices; all devices raise it.
          PeerLostError: a device will not come, since its function has ended, or has not come for
            half an hour.
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
                self._check(missing, time.monotonic() - begin, call)
                if time.monotonic() >= notice:
                    notice += NOTICE_SECONDS
                    _log.warning(
                        "process %d has waited %.0f s for process %s of %d to exchange; it may "
                        "evaluate, save or compile",
                        *(index, time.monotonic() - begin, _join(missing), self.parties),
                    )
            if len(set(calls)) > 1:
                raise UnlikeCallsError(unlike_calls(dict(enumerate(calls))))

    def _check(self, missing: list[int], seconds: float, call: str) -> None:
        ended = [i for i in missing if i in self._threads and not _is_busy(self._threads[i])]
        failures = _failures()
        if not ended:
            # A thread that has not been introduced may have failed before; torch_xla ran it.
            unknown = any(i not in self._threads for i in missing)
            failures = [e for e in failures if unknown and _came_through(e, "torch_xla")]
        if ended or failures:
            how = f"raised {failures[-1]!r}" if failures else "returned"
            lost = ended or missing
            raise PeerLostError(
                f"Process {_join(lost)} of {self.parties} will not take part in this "
                f"exchange: its function has {how}. All processes must make the same calls."
                + last_exchanges({i: self._calls[self._rounds[i] % 2][i] for i in lost}, call)
            ) from (failures[-1] if failures else None)
        if seconds > LIMIT_SECONDS:
            raise PeerLostError(
                f"Process {_join(missing)} of {self.parties} has not come to this exchange for "
                f"{seconds:.0f} s. All processes must make the same calls."
            )


def _is_busy(thread: int) -> bool:
    """Return whether a thread runs a function other than its pool's."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") not in _MACHINERY:
            return True
        frame = frame.f_back
    return False


def _failures() -> list[BaseException]:
    """Return exceptions of functions in this process' thread pools that nobody has fetched.

    Pools keep them in futures; code that could fetch them waits for the threads that wait here.
    """
    # torch_xla 2.9 holds them in a generator of `executor.map` (`pjrt._run_thread_per_device`), to
    # which nothing else leads.
    # `type`, not `isinstance`: the `__class__` of an object may be a property with side effects.
    futures = [item for item in gc.get_objects() if issubclass(type(item), Future)]
    ended = [future for future in futures if future.done() and not future.cancelled()]
    errors = [future.exception() for future in ended]
    return [e for e in errors if e is not None and not isinstance(e, PeerLostError)]


def _came_through(error: BaseException, package: str) -> bool:
    """Return whether a function of that package is in the traceback of an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    return package in names


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
