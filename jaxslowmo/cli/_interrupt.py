"""Ctrl-C that lets the step in progress finish."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopOnInterrupt:
    """Context in which the first Ctrl-C only sets `requested`; the second raises as usual.

    An exception in the middle of a step would leave a state whose buffers are given away.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
