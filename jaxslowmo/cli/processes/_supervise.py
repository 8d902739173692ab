"""The parent of training processes: it starts them, passes signals on, and starts them again.

When a process is lost, the runtime of jax aborts the others from C++, with a stack trace and code
134, before Python can act. So each process trains in a child. Its parent imports no jax and does
not communicate; it prints one line about what happened, and exits with a code for launchers.
"""

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from .._errors import INTERRUPTED, LOST_A_PROCESS, TERMINATED
from ..run._run_folder import RunFolder
from ._peers import CHILD, handling
from ._restarts import EndOfStart, Restarts

_TICK_SECONDS = 0.05
# After the heartbeat timeout the surviving processes need some seconds more to end.
_GRACE_SECONDS = 10
_HOST = "127.0.0.1"
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


# Of lines that begin like this and come from several processes, each text is printed once.
_PRINTED_ONCE = (_ERROR, "warning: ")
# Processes put this before the error of another process.
_OF_ANOTHER = re.compile(r"process \d+ has ended: ")


def supervise(argv: Sequence[str], out: Path, *, restarts: int = 0) -> int:
    """Run `jaxslowmo *argv`, one of several processes, in a child; return the exit code.

    Ctrl-C and SIGTERM are passed on as SIGTERM, so that all processes save and stop at one step; a
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

    def attempt(children: Children, arguments: list[str]) -> EndOfStart:
        return children.run({"this process": arguments}, 0.0)

    return keep_running(attempt, argv, out, restarts=restarts, speaker="error")


def launch(
    processes: int, restarts: int, heartbeat_timeout: int, command: Sequence[str], out: Path
) -> int:
    """Run `jaxslowmo train` in several processes of this machine; return the exit code.

    When a process fails with an error that may pass, wait until the others have noticed and ended
    (kill those that do not end), then start all again with `--resume`. For signals see `supervise`.

    Args:
      processes: number of processes.
      restarts: how often to start again before there is a newer checkpoint.
      heartbeat_timeout: value of `--heartbeat-timeout` for all processes, in seconds.
      command: "train" and its arguments, without those about processes.
      out: folder of the run.

    Returns:
      0 if all processes end well; else the code of the process that failed first, as in
      `supervise`.
    """

    def attempt(children: Children, arguments: list[str]) -> EndOfStart:
        with _free_port() as port:
            place = "--coordinator", f"{_HOST}:{port}", "--num-processes", str(processes)
            own = {
                f"process {index}": [*arguments, *place, "--process-id", str(index)]
                for index in range(processes)
            }
            return children.run(own, heartbeat_timeout + _GRACE_SECONDS)

    arguments = [*command, "--heartbeat-timeout", str(heartbeat_timeout)]
    return keep_running(attempt, arguments, out, restarts=restarts, speaker="launch")


def keep_running(
    attempt: "Callable[[Children, list[str]], EndOfStart]",
    argv: Sequence[str],
    out: Path,
    *,
    restarts: int,
    speaker: str,
) -> int:
    """Run until the end, and start again with `--resume` after failures that may pass.

    `Restarts` says after which failures and waits. SIGTERM and Ctrl-C end it at any time.

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
    arguments, again, ended = list(argv), Restarts(folder, restarts), None
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


class Children(contextlib.ExitStack):
    """A context in which SIGTERM and Ctrl-C end the command and its child processes.

    Both are passed on, as SIGTERM, to the processes that run, so that they save and stop at one
    step; a second Ctrl-C kills them. It must be entered in the main thread.

    Attributes:
      received: the signal that arrived, Ctrl-C before SIGTERM; None before one. After a signal the
        command starts nothing again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None
        self._children: list[_Child] = []

    def __enter__(self) -> "Children":
        self.enter_context(handling({signal.SIGINT: self._end, signal.SIGTERM: self._end}))
        return self

    def run(self, commands: dict[str, list[str]], patience: float) -> EndOfStart:
        """Run `jaxslowmo` in several processes; return how the first failure ended, or code 0.

        Args:
          commands: maps the name of a process, for messages, to its arguments.
          patience: seconds after the first failure in which the others may end by themselves;
            then they are killed.
        """
        self._children, printed = [], set[str]()
        for name, arguments in commands.items():
            self._children.append(_Child(name, arguments, printed))
            # The handler may have run before this process was in the list.
            if self.received is not None:
                self._send(signal.SIGTERM)
        failure, deadline = None, 0.0
        while any(child.process.poll() is None for child in self._children):
            time.sleep(_TICK_SECONDS)
            if failure is None:
                failure, deadline = self._failure(), time.monotonic() + patience
            elif time.monotonic() > deadline:
                self._send(signal.SIGKILL)
        failure = failure or self._failure()
        for child in self._children:
            child.end()  # all that they wrote is printed
        return failure or EndOfStart(0, "all processes ended", is_reported=True)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal arrives."""
        end = time.monotonic() + seconds
        while self.received is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))

    def _failure(self) -> EndOfStart | None:
        ends = [child.end() for child in self._children if child.process.poll()]
        # A process that lost another one did not fail first.
        return min(ends, key=lambda end: end.code == LOST_A_PROCESS, default=None)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.process.send_signal(number)  # nothing, once it has ended

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = number == self.received == signal.SIGINT
        if self.received != signal.SIGINT:
            self.received = signal.Signals(number)
        self._send(signal.SIGKILL if again else signal.SIGTERM)


class _Child:
    """A process that runs `jaxslowmo`, and whose stderr a thread passes on.

    Args:
      name: name of the process, for messages.
      arguments: arguments of the command line.
      printed: errors and warnings that are not printed again; it adds its own.

    Attributes:
      process: the process.
    """

    def __init__(self, name: str, arguments: Sequence[str], printed: set[str]) -> None:
        self._name, self._printed = name, printed
        self._lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "jaxslowmo", *arguments],
            env={**os.environ, CHILD: str(os.getpid())},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # The terminal sends Ctrl-C to this process only.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> EndOfStart:
        """Return how the process has ended."""
        self._reader.join(timeout=5)
        code, lines = self.process.returncode, list(self._lines)
        loss = describe_loss(lines)
        if (code == -signal.SIGABRT and loss is not None) or _ended_waiting(lines):
            what = loss or "another process died or cannot be reached"
            return EndOfStart(LOST_A_PROCESS, what, is_late=loss == _LATE)
        if code < 0:
            return EndOfStart(128 - code, f"{self._name} was killed by {_signal_name(-code)}")
        return EndOfStart(code, f"{self._name} ended with code {code}", is_reported=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        is_quiet = False
        with self.process.stderr as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                # After the first fatal message of the runtime all other lines are its stack traces.
                noise = bool(_NOISE.match(line))
                is_end = noise and (line[0] in "EF" or "preemption_sync" in line)
                is_quiet = is_quiet or is_end or PEER_FAILED in line
                # An error of the command itself may come at any time.
                if line.startswith(_ERROR) or not (is_quiet or noise):
                    self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        if line.startswith(_PRINTED_ONCE):
            text, count = _OF_ANOTHER.sub("", line), len(self._printed)
            self._printed.add(text)
            if len(self._printed) == count:
                return
        pass_on(line)


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
    names = (f"process {i}" + " (the coordinator)" * (i == 0) for i in sorted(lost) or [0])
    return f"{' and '.join(names)} died or cannot be reached"


def _ended_waiting(lines: Sequence[str]) -> bool:
    """Return whether an exchange has failed and no error was printed after it."""
    failed = [i for i, line in enumerate(lines) if PEER_FAILED in line]
    return bool(failed) and not any(line.startswith(_ERROR) for line in lines[failed[-1] :])


def _signal_name(number: int) -> str:
    # Most real-time signals have no name.
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Yield a free port of this machine, held within the block where Linux allows it."""
    with socket.socket() as held:
        # With SO_REUSEADDR process 0 can listen at the port while it is bound here, and Linux gives
        # it to no other program. Other systems would refuse it to process 0, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        port = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()
        yield port


def end_with_parent(parent: int) -> None:
    """Make this process end, as if killed, when its parent is gone and cannot report on it.

    The kernel of Linux does it, even if this process is stopped and still holds its ports. On other
    systems `Watch` does it.

    Args:
      parent: process id of the parent, as the parent passed it on. `os.getppid()` is too late: it
        returns another process if the parent is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def pass_on(text: str) -> None:
    """Write to stderr at once; ignore the error of a pipe that is no longer read."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
