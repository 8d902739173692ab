"""Ctrl-C that lets the step in progress finish."""

import signal
from types import FrameType


class Interrupt:
    """A context in which the first Ctrl-C sets `requested`, and the second one raises.

    So that a program can write its checkpoint between two steps, and can still be stopped where a
    step does not come back.
    """

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
