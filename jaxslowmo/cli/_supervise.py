"""The thin parent of a training process that is one of several.

Where a process is lost, the runtime of the others aborts them from C++, with a stack and code 134,
before Python can act. So each of them trains in a child, and its parent, which imports no jax and
talks to nobody, says in one line what happened and leaves with a code that launchers can act on.
"""

import ctypes
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

from ._lost import describe_loss

LOST_A_PROCESS = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130
# In the environment of the child, and of a parent that `jaxslowmo launch` started.
CHILD = "JAXSLOWMO_CHILD"
LAUNCHED = "JAXSLOWMO_LAUNCHED"
# Printed by a child whose exchange failed: whether and which other process is gone, the runtime
# tells some seconds later, when it aborts.
PEER_FAILED = "jaxslowmo: an exchange with the other processes failed"
_REMEMBERED_LINES = 400
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What the runtime says of connections that it makes or loses; `describe_loss` reads the latter.
_NOISE = re.compile(
    r"\[Gloo\]|[IWEF]\d{4} [\d:.]+ .*(coordination_service|client\.h|preemption_(notifier|sync))"
)


def is_child() -> bool:
    """Whether this process has a parent that supervises it."""
    return CHILD in os.environ


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
        before = [
            signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)
        ]
        self._reader.start()
        try:
            code = self._process.wait()
            self._reader.join(timeout=5)
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)
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
