"""The thin parent of a training process that is one of several.

Where a process is lost, the runtime of the others aborts them from C++, with a stack and code 134,
before Python can act. So each of them trains in a child, and its parent, which imports no jax and
talks to nobody, says in one line what happened and leaves with a code that launchers can act on.
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

# Printed by a child whose exchange failed: whether and which other process is gone, the runtime
# tells some seconds later, when it aborts.
PEER_FAILED = "jaxslowmo: an exchange with the other processes failed"
# With what a child begins that ends itself and says why.
_OWN = "error: "
_REMEMBERED_LINES = 400
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What the runtime says of connections that it makes or loses; `describe_loss` reads the latter.
_NOISE = re.compile(
    r"\[Gloo\]|[IWEF]\d{4} [\d:.]+ .*(coordination_service|client\.h|preemption_(notifier|sync))"
)
# The coordination service of jax lists the ids below this line.
_SILENT = "tasks are unhealthy"
# One that was started again before the others had noticed that it was gone.
_RESTARTED = re.compile(r"(\d+) unexpectedly tried to connect with a different incarnation")
_FATAL = "JAX distributed service detected fatal errors"
_JOINING = "CoordinationService/RegisterTask"
_LATE = "not all processes came together within --startup-timeout"


def end_with_parent(parent: int) -> None:
    """Makes this process end, as if killed, when its parent is gone: nobody would report on it.

    On Linux the kernel sees to it, even where this process is stopped and still holds its ports.

    Args:
      parent: its process id, as it was handed over: who asks for it late is told of another one,
        where it is gone already.
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
    """Runs `jaxslowmo *argv` in a child until it ends, and says what became of it.

    SIGTERM is passed on; Ctrl-C is too, as SIGTERM, so that all processes stop at one step; a
    second Ctrl-C kills. Neither is followed by a restart.

    Args:
      argv: arguments of the command line.
      out: folder of the run, where its checkpoints are.
      restarts: how often a child that lost another process, was killed or found a disk full is
        started again before there is a newer checkpoint.

    Returns:
      The exit code: the child's; 75 if it lost another process; 128 + n if signal n killed it;
      130 after Ctrl-C; 143 after SIGTERM that came too early for something to be saved.
    """
    return keep_running(_attempt, argv, out, restarts=restarts, speaker="error")


def _attempt(children: Children, arguments: list[str]) -> EndOfStart:
    """One run of the child; with code 75 where another process was lost."""
    ear = _Ear()
    child = Child(children, arguments, CHILD, ear.hear)
    code = child.process.wait()
    child.end()
    lines = list(ear.lines)
    loss = describe_loss(lines)
    aborted = code == -signal.SIGABRT and loss is not None
    if aborted or _ended_waiting(lines):
        what = loss or "another process died or cannot be reached"
        return EndOfStart(LOST_A_PROCESS, what, is_late=loss == _LATE)
    if code < 0:
        return EndOfStart(128 - code, f"this process was killed by {_signal_name(-code)}")
    return EndOfStart(code, f"this process ended with code {code}", is_told=True)


def describe_loss(lines: Sequence[str]) -> str | None:
    """What happened to the other processes, in words; None if the text tells of nothing.

    Args:
      lines: what a survivor wrote to stderr.
    """
    found: set[int] = set()
    for line, below in itertools.pairwise(lines):
        if _SILENT in line and re.fullmatch(r"[\s\d,]+", below):
            found.update(int(number) for number in re.findall(r"\d+", below))
    found.update(int(number) for line in lines for number in _RESTARTED.findall(line))
    if not found and not any(_FATAL in line for line in lines):
        return None
    if any(_JOINING in line for line in lines):
        return _LATE
    # Process 0 serves the coordination: an error without a list means that it is the one.
    return f"{_name(sorted(found) or [0])} died or cannot be reached"


def _ended_waiting(lines: Sequence[str]) -> bool:
    """Whether an exchange has failed, and nothing was said of it afterwards."""
    failed = [i for i, line in enumerate(lines) if PEER_FAILED in line]
    return bool(failed) and not any(line.startswith(_OWN) for line in lines[failed[-1] :])


def _name(ids: Sequence[int]) -> str:
    """As "process 2", "processes 1 and 3"."""
    if len(ids) == 1:
        return f"process {ids[0]}" + (" (the coordinator)" if ids[0] == 0 else "")
    return f"processes {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most real-time signals have none.
        return f"signal {number}"


class _Ear:
    """Passes on what the child has to say itself, and remembers the last lines of all."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self._quiet = False

    def hear(self, line: str) -> None:
        """Take a line of the child's stderr."""
        self.lines.append(line.rstrip("\n"))
        # From the first of the runtime's last words on, all is of it: stacks, mostly.
        noise = bool(_NOISE.match(line))
        is_end = noise and (line[0] in "EF" or "preemption_sync" in line)
        self._quiet = self._quiet or is_end or PEER_FAILED in line
        # What the process has to say itself comes at any time.
        if line.startswith(_OWN) or not (self._quiet or noise):
            pass_on(line)
