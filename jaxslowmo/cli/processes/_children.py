"""The processes that a command starts, and the signals that end the command with them."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from ._stop import Handler, handling

_TICK_SECONDS = 0.1


class Children:
    """Context in which SIGTERM and Ctrl-C end the command, whatever it does just then.

    Both are passed on, as SIGTERM, to the processes that run, so that they save and stop at one
    step; a second Ctrl-C kills them. It must be entered in the main thread.

    Attributes:
      asked: the signal that came, Ctrl-C before SIGTERM; None as long as none did. From then on the
        command starts nothing any more.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._handled = contextlib.ExitStack()

    def __enter__(self) -> "Children":
        handlers: dict[int, Handler] = {signal.SIGINT: self._end, signal.SIGTERM: self._end}
        self._handled.enter_context(handling(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[Any]":
        """Starts a process; one that a signal came before, or meanwhile, gets it at once.

        Args:
          command: program and arguments.
          environ: all of its environment.
          **options: further ones of `subprocess.Popen`.
        """
        process = subprocess.Popen(command, env=environ, **options)
        self._processes.append(process)
        # The handler may have run before this process was there for it to see.
        if self.asked is not None:
            self.send(signal.SIGTERM)
        return process

    def send(self, number: int) -> None:
        """Sends a signal to all processes that run."""
        self._processes = [process for process in self._processes if process.poll() is None]
        for process in self._processes:
            process.send_signal(number)

    def pause(self, seconds: float) -> None:
        """Waits; not longer than until a signal comes."""
        end = time.monotonic() + seconds
        while self.asked is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = number == self.asked == signal.SIGINT
        if self.asked != signal.SIGINT:
            self.asked = signal.Signals(number)
        self.send(signal.SIGKILL if again else signal.SIGTERM)
