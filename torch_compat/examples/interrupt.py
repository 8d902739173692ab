"""What Ctrl-C does."""

import os
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


def end_forked_processes_at_once() -> None:
    """From now on Ctrl-C ends processes forked from this one at once; here it raises as ever.

    The threads of a process of `xmp.spawn` would run on, and the program would wait for them.
    """
    parent = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        os._exit(1)

    signal.signal(signal.SIGINT, handle)
