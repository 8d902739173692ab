"""The parent process that supervises one of several training processes.

When a process is lost, the runtime of jax aborts the others from C++, with a stack trace and code
134, before Python can act. So each process trains in a child. Its parent imports no jax and does
not communicate; it prints one line about what happened, and exits with a code for launchers.
"""

import ctypes
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from .._errors import LOST_A_PROCESS
from ._peers import CHILD
from ._restarts import Child, Children, EndOfStart, keep_running, pass_on

# A child prints this when an exchange fails. Some seconds later the runtime aborts it and reports
# which process is gone, if any.
PEER_FAILED = "jaxslowmo: an exchange with the other processes failed"
# A child that ends itself begins its last line with this.
_ERROR = "error: "
_REMEMBERED_LINES = 400
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Messages of the runtime about connections that it makes or loses; `describe_loss` reads them.
_NOISE = re.compile(
    r"\[Gloo\]|[IWEF]\d{4} [\d:.]+ .*(coordination_service|client\.h|preemption_(notifier|sync))"
)
# The coordination service of jax lists the ids below this line.
_SILENT = "tasks are unhealthy"
# The message about a process that started again before the others noticed that it was gone.
_RESTARTED = re.compile(r"(\d+) unexpectedly tried to connect with a different incarnation")
_FATAL = "JAX distributed service detected fatal errors"
_JOINING = "CoordinationService/RegisterTask"
_LATE = "not all processes came together within --startup-timeout"


def end_with_parent(parent: int) -> None:
    """Make this process end, as if killed, when its parent is gone and cannot report on it.

    On Linux the kernel kills it, even if this process is stopped and still holds its ports.

    Args:
      parent: process id of the parent, as the parent passed it on. `os.getppid()` is too late: it
        returns another process if the parent is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def supervise(argv: Sequence[str], out: Path, *, restarts: int = 0) -> int:
    """Run `jaxslowmo *argv` in a child until it ends, and return the exit code.

    SIGTERM is passed on. Ctrl-C is passed on as SIGTERM, so that all processes stop at one step; a
    second Ctrl-C kills the child. After a signal there is no restart.

    Args:
      argv: arguments of the command line.
      out: folder of the run, where its checkpoints are.
      restarts: how often a child that lost another process, was killed or found a disk full is
        started again before there is a newer checkpoint.

    Returns:
      The code of the child; 75 if it lost another process; 128 + n if signal n killed it; 130 after
      Ctrl-C; 143 after SIGTERM that came too early to save anything.
    """
    return keep_running(_attempt, argv, out, restarts=restarts, speaker="error")


def _attempt(children: Children, arguments: list[str]) -> EndOfStart:
    """Run the child once, and return how it ended: code 75 if it lost another process."""
    listener = _Listener()
    child = Child(children, arguments, CHILD, listener.hear)
    code = child.process.wait()
    child.end()
    lines = list(listener.lines)
    loss = describe_loss(lines)
    aborted = code == -signal.SIGABRT and loss is not None
    if aborted or _ended_waiting(lines):
        what = loss or "another process died or cannot be reached"
        return EndOfStart(LOST_A_PROCESS, what, is_late=loss == _LATE)
    if code < 0:
        return EndOfStart(128 - code, f"this process was killed by {_signal_name(-code)}")
    return EndOfStart(code, f"this process ended with code {code}", is_reported=True)


def describe_loss(lines: Sequence[str]) -> str | None:
    """Return which other process was lost, in words; None if the lines report none.

    Args:
      lines: the lines that a surviving process wrote to stderr.
    """
    lost: set[int] = set()
    for line, below in itertools.pairwise(lines):
        if _SILENT in line and re.fullmatch(r"[\s\d,]+", below):
            lost.update(int(number) for number in re.findall(r"\d+", below))
    lost.update(int(number) for line in lines for number in _RESTARTED.findall(line))
    if not lost and not any(_FATAL in line for line in lines):
        return None
    if any(_JOINING in line for line in lines):
        return _LATE
    # Process 0 runs the coordination service: an error without a list means that it is lost.
    return f"{_name(sorted(lost) or [0])} died or cannot be reached"


def _ended_waiting(lines: Sequence[str]) -> bool:
    """Return whether an exchange has failed and no error was printed after it."""
    failed = [i for i, line in enumerate(lines) if PEER_FAILED in line]
    return bool(failed) and not any(line.startswith(_ERROR) for line in lines[failed[-1] :])


def _name(ids: Sequence[int]) -> str:
    """Return processes in words, such as "process 2" or "processes 1 and 3"."""
    if len(ids) == 1:
        return f"process {ids[0]}" + (" (the coordinator)" if ids[0] == 0 else "")
    return f"processes {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most real-time signals have no name.
        return f"signal {number}"


class _Listener:
    """A reader of the child's stderr: passes on its own lines, remembers the last of all lines."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self._quiet = False

    def hear(self, line: str) -> None:
        """Take a line of the child's stderr."""
        self.lines.append(line.rstrip("\n"))
        # After the first fatal message of the runtime all other lines are its stack traces.
        noise = bool(_NOISE.match(line))
        is_end = noise and (line[0] in "EF" or "preemption_sync" in line)
        self._quiet = self._quiet or is_end or PEER_FAILED in line
        # An error of the command itself may come at any time.
        if line.startswith(_ERROR) or not (self._quiet or noise):
            pass_on(line)
