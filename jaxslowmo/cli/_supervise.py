"""The parent of training processes: it starts them, passes signals on, and starts them again.

When a process is lost, the runtime of jax aborts the others from C++, with a stack trace and code
134, before Python can act. So each process trains in a child. Its parent imports no jax and does
not communicate; it prints one line about what happened, and exits with a code for launchers.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from .._support.files import complete_steps
from ._config import LaunchConfig, TrainConfig, argument_errors, read_config, warn_unused
from ._errors import (
    FINAL,
    INTERRUPTED,
    LOST_A_PROCESS,
    TERMINATED,
    TOO_LATE,
    TRY_AGAIN,
    CommandError,
)
from ._folder import RunFolder
from ._processes import (
    CHILD,
    RUNTIME_LOG,
    is_one_of_several,
    known_processes,
    signal_handlers,
    write_stderr,
)

_FIRST_WAIT, _LONGEST_WAIT = 1, 60  # seconds
# A run that has failed this often at one step will fail there again.
_MAX_FAILURES = 5
_OVERWRITE, _RESUME = "--overwrite", "--resume"
_TICK_SECONDS = 0.05
# After the heartbeat timeout the surviving processes need some seconds more to end.
_GRACE_SECONDS = 10
_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Of lines that begin like this and come from several processes, each text is printed once.
_PRINTED_ONCE = ("error: ", "warning: ")
# Processes put this before the error of another process.
_OF_ANOTHER = re.compile(r"process \d+ has ended: ")


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


class Restarts:
    """The decisions whether and when a run starts again, from its failures so far."""

    def __init__(self, folder: RunFolder, most: int) -> None:
        self._folder, self._most = folder, most
        self._left, self._wait = most, _FIRST_WAIT
        self._saved = folder.newest_step()
        self._failed_step: int | None = None
        self._failures = 0
        # Checkpoints of an earlier run in the folder, which --overwrite deletes.
        self._old = _checkpoint_ids(folder)

    def next_start(self, ended: EndOfStart) -> tuple[int | None, str]:
        """Return the seconds until the next start (None: no start), and words for the user."""
        if ended.is_final:
            return None, ""
        earlier, self._saved = self._saved, self._folder.newest_step()
        if self._saved is not None and (earlier is None or self._saved > earlier):
            self._left, self._wait = self._most, _FIRST_WAIT
        if not ended.is_late:
            step = self._folder.newest_record_step()
            step = self._saved if step is None else step
            self._failures = self._failures + 1 if step == self._failed_step else 1
            self._failed_step = step
        if not self._left:
            return None, "no restarts left" if self._most else ""
        if self._failures >= _MAX_FAILURES:
            step = self._failed_step
            where = "before the first step" if step is None else f"at step {step}"
            return None, f"not started again after {_MAX_FAILURES} failures in a row {where}"
        wait, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)
        self._left -= 1
        return wait, f"starting again in {wait} s (restarts left: {self._left})"

    def resume_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a start that goes on from the last checkpoint."""
        if _OVERWRITE in arguments and self._old & _checkpoint_ids(self._folder):
            # The run failed before it had deleted the old run, which must not be resumed.
            return [*arguments]
        return [x for x in arguments if x not in (_OVERWRITE, _RESUME)] + [_RESUME]


def _checkpoint_ids(folder: RunFolder) -> set[tuple[int, int]]:
    """Return ids of the checkpoints, which differ for one that replaces another."""
    ids = set()
    with contextlib.suppress(OSError):
        for step in complete_steps(folder / "checkpoints"):
            status = (folder / "checkpoints" / str(step)).stat()
            ids.add((status.st_ino, status.st_mtime_ns))
    return ids


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
      heartbeat_timeout: seconds after which processes miss one that is lost.
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

    return keep_running(attempt, command, out, restarts=restarts, speaker="launch")


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

    def print_line(*parts: str) -> None:
        # One write for the whole line, because other processes write to stderr, too.
        write_stderr(f"{speaker}: {'; '.join(filter(None, parts))}\n")

    folder = RunFolder(out)
    arguments, again, ended = list(argv), Restarts(folder, restarts), None
    with Children(folder / "logs") as children:
        while children.received is None:
            ended = attempt(children, arguments)
            if ended.is_final and ended.is_reported and children.received != signal.SIGINT:
                return ended.code
            if children.received is not None:
                break
            wait, plan = again.next_start(ended)
            if plan or not ended.is_reported:
                print_line(ended.what, folder.describe_checkpoint(), plan)
            if wait is None:
                return ended.code
            children.pause(wait)
            arguments = again.resume_arguments(arguments)
        if children.received == signal.SIGINT:
            return INTERRUPTED
        print_line("ended by SIGTERM", folder.describe_checkpoint())
        return TERMINATED


class Children(contextlib.ExitStack):
    """A context in which SIGTERM and Ctrl-C end the command and its child processes.

    Both are passed on, as SIGTERM, to the processes that run, so that they save and stop at one
    step; a second Ctrl-C kills them. It must be entered in the main thread.

    Args:
      logs: folder for what the runtime of jax has written in a process that a signal ended.

    Attributes:
      received: the signal that arrived, Ctrl-C before SIGTERM; None before one. After a signal the
        command starts nothing again.
    """

    def __init__(self, logs: Path) -> None:
        super().__init__()
        self.received: signal.Signals | None = None
        self._logs = logs
        self._children: list[_Child] = []

    def __enter__(self) -> "Children":
        self.enter_context(signal_handlers({signal.SIGINT: self._end, signal.SIGTERM: self._end}))
        return self

    def run(self, commands: dict[str, list[str]], patience: float) -> EndOfStart:
        """Run `jaxslowmo` in several processes; return how the first failure ended, or code 0.

        Args:
          commands: maps the name of a process, for messages, to its arguments.
          patience: seconds after the first failure in which the others may end by themselves;
            then they are killed.
        """
        self._children, printed = [], set[str]()
        with contextlib.ExitStack() as files:
            for name, arguments in commands.items():
                of_runtime = files.enter_context(tempfile.TemporaryFile())
                self._children.append(_Child(name, arguments, printed, of_runtime))
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
            for child in self._children:
                child.reader.join(timeout=5)  # all that they wrote is printed
            failure = failure or self._failure()
        return failure or EndOfStart(0, "all processes ended", is_reported=True)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal arrives."""
        end = time.monotonic() + seconds
        while self.received is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))

    def _failure(self) -> EndOfStart | None:
        ends = [child.end(self._logs) for child in self._children if child.process.poll()]
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

    What C++ writes to stderr after the child has called `separate_runtime_output`, such as traces,
    goes to `of_runtime` instead.

    Args:
      name: name of the process, for messages.
      arguments: arguments of the command line.
      printed: errors and warnings that are not printed again; it adds its own.
      of_runtime: the file for what C++ writes.

    Attributes:
      process: the process.
      reader: the thread, which ends after the process.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], printed: set[str], of_runtime: IO[bytes]
    ) -> None:
        self._name, self._printed, self._of_runtime = name, printed, of_runtime
        number = of_runtime.fileno()
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "jaxslowmo", *arguments],
            env={**os.environ, CHILD: str(os.getpid()), RUNTIME_LOG: str(number)},
            pass_fds=[number],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # The terminal sends Ctrl-C to this process only.
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def end(self, logs: Path) -> EndOfStart:
        """Return how the process has ended."""
        code = self.process.returncode
        if code == TOO_LATE:
            return EndOfStart(TRY_AGAIN, "too late", is_reported=True, is_late=True)
        if code >= 0:
            return EndOfStart(code, f"{self._name} ended with code {code}", is_reported=True)
        details = self._details(logs)
        if code == -signal.SIGABRT:
            what = f"another process died or cannot be reached{details}"
            return EndOfStart(LOST_A_PROCESS, what)
        # Most real-time signals have no name.
        killer = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        return EndOfStart(128 - code, f"{self._name} was killed by {killer}{details}")

    def _details(self, logs: Path) -> str:
        """Keep what C++ has written in a file, and name that; "" where it is nothing."""
        self._of_runtime.seek(0)
        text = self._of_runtime.read()
        path = logs / f"killed-{socket.gethostname()}-{self.process.pid}.txt"
        with contextlib.suppress(OSError):  # a full disk
            if text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
                return f" (details: {path})"
        return ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                text = _OF_ANOTHER.sub("", line)
                if not line.startswith(_PRINTED_ONCE) or text not in self._printed:
                    write_stderr(line)
                self._printed.add(text)


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


_ALONE = "with one process"
_SET_BY_LAUNCH = ("--coordinator", "--num-processes", "--process-id", "--restarts", "--dry-run")


def train_command(config: TrainConfig, words: Sequence[str]) -> int:
    """Train, or supervise the child that trains if there are several processes."""
    is_child, several = CHILD in os.environ, is_one_of_several(config.cluster)
    if not is_child:
        alone = {} if several else {"restarts": _ALONE, "process_logs": _ALONE}
        warn_unused(config, words[1:], **alone)
    if several and not is_child and not config.dry_run:
        with argument_errors():  # before any process waits for the others
            config.check_processes(known_processes(config.cluster) or 2)
        assert config.run.out is not None
        return supervise(words, config.run.out, restarts=config.cluster.restarts)
    if is_child:
        end_with_parent(int(os.environ[CHILD]))
        # The parent passes Ctrl-C on as SIGTERM, which ends all processes. A KeyboardInterrupt in
        # one of them would leave the others waiting.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ._run import dry_run, train  # loads jax, which the process that supervises does without

    return dry_run(config) if config.dry_run else train(config)


def launch_command(config: LaunchConfig, words: Sequence[str]) -> int:
    """Start the processes of `train` on this machine.

    Raises:
      CommandError: the words are not "train" and right options of it, or options that launch sets.
    """
    if words[:1] != ["train"]:
        shown = " ".join(words) or "nothing"
        raise CommandError(f"launch runs: jaxslowmo launch ... -- train ...; got {shown}")
    if refused := [x for x in _SET_BY_LAUNCH for word in words if word.partition("=")[0] == x]:
        raise CommandError(
            f"{', '.join(refused)} of train: launch decides it, by its own options before --"
        )
    # The options of train are checked here once, and not first in every process.
    command = read_config(TrainConfig, "jaxslowmo train", words[1:])
    warn_unused(command, words[1:])
    with argument_errors():
        command.check_processes(max(2, config.processes))
    assert command.run.out is not None
    patience = command.cluster.heartbeat_timeout
    return launch(config.processes, config.restarts, patience, words, command.run.out)
