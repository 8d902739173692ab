"""Starting a run again after a failure: when, how often, and with which arguments. No jax."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .._errors import FINAL, INTERRUPTED, TERMINATED
from ..run._run_folder import RunFolder
from ._peers import handling

_TICK_SECONDS = 0.1


class Children(contextlib.ExitStack):
    """A context in which SIGTERM and Ctrl-C end the command and its child processes.

    Both are passed on, as SIGTERM, to the processes that run, so that they save and stop at one
    step; a second Ctrl-C kills them. It must be entered in the main thread.

    Attributes:
      received: the signal that arrived, Ctrl-C before SIGTERM; None before one. After a signal the
        command starts no further process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Children":
        self.enter_context(handling({signal.SIGINT: self._end, signal.SIGTERM: self._end}))
        return self

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a process and return it; if a signal has arrived, pass it on at once.

        Args:
          command: program and arguments.
          environ: its whole environment.
          **options: further arguments of `subprocess.Popen`.
        """
        process = subprocess.Popen(command, env=environ, **options)
        self._processes.append(process)
        # The handler may have run before this process was in the list.
        if self.received is not None:
            self.send(signal.SIGTERM)
        return process

    def send(self, number: int) -> None:
        """Send a signal to all processes that still run."""
        self._processes = [process for process in self._processes if process.poll() is None]
        for process in self._processes:
            process.send_signal(number)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal arrives."""
        end = time.monotonic() + seconds
        while self.received is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = number == self.received == signal.SIGINT
        if self.received != signal.SIGINT:
            self.received = signal.Signals(number)
        self.send(signal.SIGKILL if again else signal.SIGTERM)


class Child:
    """A child process that runs `jaxslowmo`, and whose stderr this process reads.

    Args:
      children: the context that starts it.
      arguments: arguments of the command line.
      mark: environment variable of the child that holds the id of this process.
      hear: called with each line of its stderr, in another thread.
      **options: further arguments of `subprocess.Popen`.

    Attributes:
      process: the process.
    """

    def __init__(
        self,
        children: Children,
        arguments: Sequence[str],
        mark: str,
        hear: Callable[[str], None],
        **options: Any,
    ) -> None:
        self.process = children.start(
            [sys.executable, "-m", "jaxslowmo", *arguments],
            {**os.environ, mark: str(os.getpid())},
            **options,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Wait until all of stderr is read; the process has ended."""
        self._reader.join(timeout=5)

    def _read(self, hear: Callable[[str], None]) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                hear(line)


_FIRST_WAIT, _LONGEST_WAIT = 1, 60  # seconds
# A run that has failed this often at one step will fail there again.
_MOST_AT_ONE_STEP = 5
_OVERWRITE, _RESUME = "--overwrite", "--resume"


@dataclasses.dataclass(frozen=True)
class EndOfStart:
    """The way in which one start of a run ended.

    Attributes:
      code: the exit code; 128 + n after signal n.
      what: what happened, in words.
      is_reported: whether the process has printed the reason itself.
      is_late: whether the reason is that not all processes joined in time.
    """

    code: int
    what: str
    is_reported: bool = False
    is_late: bool = False

    @property
    def is_final(self) -> bool:
        """True if another start would end in the same way, or is not wanted."""
        return self.code in FINAL


def keep_running(
    attempt: Callable[[Children, list[str]], EndOfStart],
    argv: Sequence[str],
    out: Path,
    *,
    restarts: int,
    speaker: str,
) -> int:
    """Run until the end, and start again with `--resume` after failures that may pass.

    Between two starts it waits 1, 2, 4, ... 60 s. It gives up after `restarts` starts without a
    newer checkpoint, and after five failures in a row at one step. SIGTERM and Ctrl-C end it at any
    time.

    Args:
      attempt: `attempt(children, arguments)` starts the processes and waits for their end.
      argv: arguments of the first start.
      out: folder of the run.
      restarts: how often to start again before there is a newer checkpoint.
      speaker: first word of the lines on stderr.

    Returns:
      The code of the last start; 130 after Ctrl-C; after SIGTERM 0 if all was saved, the code of an
      error that the signal did not cause, else 143.
    """

    def say(*parts: str) -> None:
        # One write for the whole line, because other processes write to stderr, too.
        pass_on(f"{speaker}: {'; '.join(filter(None, parts))}\n")

    folder = RunFolder(out)
    arguments, again, ended = list(argv), _Restarts(folder, restarts), None
    with Children() as children:
        while children.received is None:
            ended = attempt(children, arguments)
            if children.received is not None:
                break
            if ended.is_final and ended.is_reported:
                return ended.code
            wait, plan = again.after(ended)
            if plan or not ended.is_reported:
                say(ended.what, folder.last_saved(), plan)
            if wait is None:
                return ended.code
            ended = None
            children.pause(wait)
            arguments = again.resuming(arguments)
        if children.received == signal.SIGINT:
            return INTERRUPTED
        if ended is not None and ended.is_final and ended.is_reported:
            return ended.code
        say("ended by SIGTERM", folder.last_saved())
        return TERMINATED


class _Restarts:
    """The decisions whether and when a run starts again, from its failures so far."""

    def __init__(self, folder: RunFolder, most: int) -> None:
        self._folder, self._most = folder, most
        self._left, self._wait = most, _FIRST_WAIT
        self._saved = folder.newest_step()
        self._place: int | None = None
        self._at_place = 0
        # Checkpoints of an earlier run in the folder, which --overwrite deletes.
        self._old = _checkpoint_ids(folder)

    def after(self, ended: EndOfStart) -> tuple[int | None, str]:
        """Return the seconds until the next start (None: no start), and words for the user."""
        if ended.is_final:
            return None, ""
        earlier, self._saved = self._saved, self._folder.newest_step()
        if self._saved is not None and (earlier is None or self._saved > earlier):
            self._left, self._wait = self._most, _FIRST_WAIT
        if not ended.is_late:
            place = self._folder.last_recorded()
            place = self._saved if place is None else place
            self._at_place = self._at_place + 1 if place == self._place else 1
            self._place = place
        if not self._left:
            return None, "no restarts left" if self._most else ""
        if self._at_place >= _MOST_AT_ONE_STEP:
            where = "before the first step" if self._place is None else f"at step {self._place}"
            return None, f"not started again after {_MOST_AT_ONE_STEP} failures in a row {where}"
        wait, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)
        self._left -= 1
        return wait, f"starting again in {wait} s (restarts left: {self._left})"

    def resuming(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a start that goes on from the last checkpoint."""
        if _OVERWRITE in arguments:
            # The run failed before it had deleted the old run, which must not be resumed.
            if self._old & _checkpoint_ids(self._folder):
                return list(arguments)
            arguments = [argument for argument in arguments if argument != _OVERWRITE]
        return [*arguments, *([] if _RESUME in arguments else [_RESUME])]


def pass_on(text: str) -> None:
    """Write to stderr at once; ignore the error of a pipe that is no longer read."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _checkpoint_ids(folder: RunFolder) -> set[tuple[int, int, int]]:
    """Return ids of the checkpoints, which differ for one that replaces another."""
    ids = set()
    for step in folder.saved_steps():
        with contextlib.suppress(OSError):
            status = (folder.checkpoints / str(step)).stat()
            ids.add((step, status.st_ino, status.st_mtime_ns))
    return ids
