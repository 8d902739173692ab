"""`jaxslowmo launch` starts all processes of a run on this machine, again when one is lost."""

import contextlib
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._errors import LOST_A_PROCESS, TERMINATED, CommandError
from ._peers import LAUNCHED
from ._restarts import Child, Children, EndOfStart, keep_running, pass_on

# After the heartbeat timeout the surviving processes need some seconds more to end.
_GRACE_SECONDS = 10
_SET_BY_LAUNCH = (
    "--coordinator",
    "--coordinator-bind",
    "--num-processes",
    "--process-id",
    "--restarts",
)
_HOST = "127.0.0.1"
_MOST_PROCESSES = 1024  # on one machine
# Lines that begin like this come from all processes at once, so each text is printed once.
_PRINTED_ONCE = ("error: ", "warning: ")
# Processes put this before the error of another process.
_OF_ANOTHER = re.compile(r"process \d+ has ended: ")


def launch(
    processes: int, restarts: int, heartbeat_timeout: int, command: Sequence[str], out: Path
) -> int:
    """Run `jaxslowmo train` in several processes, and return the exit code.

    When a process fails with an error that may pass, wait until the others have noticed and ended
    (kill those that do not end), then start all again with `--resume`. Ctrl-C and SIGTERM are
    passed on to the processes; after that nothing is started again.

    Args:
      processes: number of processes.
      restarts: how often to start again before there is a newer checkpoint.
      heartbeat_timeout: value of `--heartbeat-timeout` for all processes, in seconds.
      command: "train" and its arguments; `check_launched` has accepted them.
      out: folder of the run.

    Returns:
      0 if all processes end well; the code of the process that failed first, if the run is not
      started again; 130 after Ctrl-C; 143 after SIGTERM that came too early to save anything.
    """

    def attempt(children: Children, arguments: list[str]) -> EndOfStart:
        with _free_port() as port:
            group = _Group(children, processes, port, arguments)
            return group.wait(heartbeat_timeout + _GRACE_SECONDS)

    arguments = [*command, "--heartbeat-timeout", str(heartbeat_timeout)]
    return keep_running(attempt, arguments, out, restarts=restarts, speaker="launch")


def check_launched(processes: int, command: Sequence[str]) -> None:
    """Raise `CommandError` unless several processes of this machine can run a command.

    Raises:
      CommandError: wrong number of processes, not "train", or options that launch sets itself.
    """
    if not 1 <= processes <= _MOST_PROCESSES:
        raise CommandError(f"--processes must be 1 to {_MOST_PROCESSES}, got {processes}")
    if not command or command[0] != "train":
        words = " ".join(command) or "nothing"
        raise CommandError(f"launch runs: jaxslowmo launch ... -- train ...; got {words}")
    refused = [x for x in _SET_BY_LAUNCH for word in command if word.partition("=")[0] == x]
    if refused:
        raise CommandError(f"{', '.join(refused)} of train: launch decides it")


class _Group:
    """One start of all processes; an error or warning that several print is passed on once."""

    def __init__(
        self, children: Children, processes: int, port: int, arguments: Sequence[str]
    ) -> None:
        self._children, self._num_processes = children, processes
        self._started: list[Child] = []
        self._printed: set[str] = set()
        self._lock = threading.Lock()
        place = "--coordinator", f"{_HOST}:{port}", "--num-processes", str(processes)
        for index in range(processes):
            if children.received is not None:
                break
            child_arguments = [*arguments, *place, "--process-id", str(index)]
            # A new session, so that the terminal sends Ctrl-C to this process only.
            child = Child(children, child_arguments, LAUNCHED, self._hear, start_new_session=True)
            self._started.append(child)

    def wait(self, patience: float) -> EndOfStart:
        """Wait until all have ended; return how the first failure ended, or code 0 without one.

        Args:
          patience: seconds after the first failure in which the others may end by themselves;
            then they are killed.
        """
        failed, deadline = None, None
        while any(child.process.poll() is None for child in self._started):
            time.sleep(0.05)
            if failed is None:
                failed = self._failure()
                deadline = time.monotonic() + patience
            elif deadline is not None and time.monotonic() > deadline:
                self._children.send(signal.SIGKILL)
        for child in self._started:
            child.end()
        if len(self._started) < self._num_processes:
            return EndOfStart(TERMINATED, "not all processes were started")
        return failed or self._failure() or EndOfStart(0, "all processes ended", is_reported=True)

    def _failure(self) -> EndOfStart | None:
        codes = [child.process.poll() or 0 for child in self._started]
        failed = [(i, code) for i, code in enumerate(codes) if code]
        if not failed:
            return None
        # A process that lost another one did not fail first.
        index, code = min(failed, key=lambda pair: pair[1] == LOST_A_PROCESS)
        is_reported, code = code > 0, 128 - code if code < 0 else code
        return EndOfStart(code, f"process {index} ended with code {code}", is_reported=is_reported)

    def _hear(self, line: str) -> None:
        if line.startswith(_PRINTED_ONCE):
            what = _OF_ANOTHER.sub("", line)
            with self._lock:
                if what in self._printed:
                    return
                self._printed.add(what)
        pass_on(line)


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Yield a free port of this machine, held within the block where Linux allows it."""
    with socket.socket() as held:
        if sys.platform == "linux":
            # With SO_REUSEADDR process 0 can listen at the port while it is bound here, and the
            # system gives it to no other program.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        port = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()
        yield port
