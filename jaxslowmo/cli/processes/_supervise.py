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
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .._errors import INTERRUPTED, LOST_A_PROCESS
from ._launchers import CHILD, LAUNCHED
from ._stop import handling

# Printed by a child whose exchange failed: whether and which other process is gone, the runtime
# tells some seconds later, when it aborts.
PEER_FAILED = "jaxslowmo: an exchange with the other processes failed"
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


def end_with_parent() -> None:
    """Makes this process end, as if killed, when its parent is gone: nobody would report on it.

    On Linux the kernel sees to it, even where this process is stopped and still holds its ports.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def supervise(argv: Sequence[str], out: Path, *, restarts: int = 0) -> int:
    """Runs `jaxslowmo *argv` in a child until it ends, and says what became of it.

    SIGTERM is passed on; Ctrl-C is too, as SIGTERM, so that all processes stop at one step; a
    second Ctrl-C kills.

    Args:
      argv: arguments of the command line.
      out: folder of the run, where its checkpoints are.
      restarts: how often a child that lost another process, or was killed, is started again.

    Returns:
      The exit code: the child's; 75 if it lost another process; 128 + n if signal n killed it;
      130 after Ctrl-C.
    """
    arguments = list(argv)
    if LAUNCHED in os.environ:
        end_with_parent()
    while True:
        child = _Child(arguments)
        code = child.wait()
        if child.was_interrupted:
            return INTERRUPTED
        lost = code == LOST_A_PROCESS
        if code >= 0 and not lost:
            return code
        what = child.loss or "another process died or cannot be reached"
        if not lost:
            what = f"this process was killed by {signal.Signals(-code).name}"
        again = f"; starting again (restarts left: {restarts - 1})" if restarts else ""
        print(f"error: {what}; {last_saved(out)}{again}", file=sys.stderr, flush=True)
        if not restarts:
            return code if lost else 128 - code
        restarts -= 1
        if "--resume" not in arguments:
            arguments.append("--resume")


def last_saved(out: Path) -> str:
    """Which step a run that starts again would go on from, in words."""
    folder = out / "checkpoints"
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    if not steps:
        return f"no checkpoint in {folder}"
    return f"the last saved step is {max(steps)}, in {folder}"


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
        return "not all processes came together within --startup-timeout"
    # Process 0 serves the coordination: an error without a list means that it is the one.
    return f"{_name(sorted(found) or [0])} died or cannot be reached"


def _name(ids: Sequence[int]) -> str:
    """As "process 2", "processes 1 and 3"."""
    if len(ids) == 1:
        return f"process {ids[0]}" + (" (the coordinator)" if ids[0] == 0 else "")
    return f"processes {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


class _Child:
    """One run of the child; the parent must be the main thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.loss: str | None = None
        self.was_interrupted = False
        self._lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxslowmo", *arguments],
            env={**os.environ, CHILD: "1"},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)

    def wait(self) -> int:
        """The child's code, 75 for one that ended because another process was lost."""
        with handling({signal.SIGINT: self._pass_on, signal.SIGTERM: self._pass_on}):
            self._reader.start()
            code = self._process.wait()
            self._reader.join(timeout=5)
        lines = list(self._lines)
        self.loss = describe_loss(lines)
        aborted = code == -signal.SIGABRT and self.loss is not None
        if aborted or any(PEER_FAILED in line for line in lines):
            return LOST_A_PROCESS
        return code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.was_interrupted:
            self._process.kill()
            return
        self.was_interrupted |= number == signal.SIGINT
        self._process.terminate()

    def _read(self) -> None:
        assert self._process.stderr is not None
        quiet = False
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))
            # From the first of the runtime's last words on, all is of it: stacks, mostly.
            noise = bool(_NOISE.match(line))
            is_end = noise and (line[0] in "EF" or "preemption_sync" in line)
            quiet = quiet or is_end or PEER_FAILED in line
            if not quiet and not noise:
                sys.stderr.write(line)
                sys.stderr.flush()
