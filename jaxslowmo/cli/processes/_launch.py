"""`jaxslowmo launch`: the processes of a run on this machine, started again when one is lost."""

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

# Beyond the heartbeat: what survivors need to notice that a process is gone, and to end.
_GRACE_SECONDS = 10
_OWN = ("--coordinator", "--coordinator-bind", "--num-processes", "--process-id", "--restarts")
_HOST = "127.0.0.1"
_MOST_PROCESSES = 1024  # of one machine
# What all processes find out at once, each of them would say.
_TOLD_ONCE = ("error: ", "warning: ")
# With what others tell why one of them has ended.
_OF_ANOTHER = re.compile(r"process \d+ has ended: ")


def launch(
    processes: int, restarts: int, heartbeat_timeout: int, command: Sequence[str], out: Path
) -> int:
    """Runs `jaxslowmo train` in so many processes; 0 once all have ended well.

    When one fails in a way that can pass, waits until the others have noticed and ended (kills
    those that do not), then starts all again with `--resume`. Ctrl-C and SIGTERM are passed on, and
    nothing is started after them.

    Args:
      processes: how many.
      restarts: how often to start again before there is a newer checkpoint.
      heartbeat_timeout: of the processes, in seconds.
      command: "train" and its arguments, which `check_launched` has looked at.
      out: folder of the run.

    Returns:
      0; or the code of the process that failed first, where it is not started again; 130 after
      Ctrl-C; 143 after SIGTERM that came too early for something to be saved.
    """

    def attempt(children: Children, arguments: list[str]) -> EndOfStart:
        with _own_port() as port:
            group = _Group(children, processes, port, arguments)
            return group.wait(heartbeat_timeout + _GRACE_SECONDS)

    arguments = [*command, "--heartbeat-timeout", str(heartbeat_timeout)]
    return keep_running(attempt, arguments, out, restarts=restarts, speaker="launch")


def check_launched(processes: int, command: Sequence[str]) -> None:
    """Refuses what is not the training that several processes of this machine can do.

    Raises:
      CommandError: for a command that cannot be launched.
    """
    if not 1 <= processes <= _MOST_PROCESSES:
        raise CommandError(f"--processes must be 1 to {_MOST_PROCESSES}, got {processes}")
    if not command or command[0] != "train":
        given = " ".join(command) or "nothing"
        raise CommandError(f"launch runs: jaxslowmo launch ... -- train ...; got {given}")
    own = [name for name in _OWN for given in command if given.partition("=")[0] == name]
    if own:
        raise CommandError(f"{', '.join(own)} of train: launch decides it")


class _Group:
    """One start of all processes; an error or a warning that several tell of comes once."""

    def __init__(
        self, children: Children, processes: int, port: int, arguments: Sequence[str]
    ) -> None:
        self._children, self._wanted = children, processes
        self._started: list[Child] = []
        self._told: set[str] = set()
        self._lock = threading.Lock()
        place = "--coordinator", f"{_HOST}:{port}", "--num-processes", str(processes)
        for index in range(processes):
            if children.asked is not None:
                break
            own = [*arguments, *place, "--process-id", str(index)]
            # Ctrl-C reaches them through this process alone, once.
            child = Child(children, own, LAUNCHED, self._hear, start_new_session=True)
            self._started.append(child)

    def wait(self, patience: float) -> EndOfStart:
        """How the process that failed first ended, once all have; code 0 if none failed.

        Args:
          patience: seconds that the others get to end after that, before they are killed.
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
        if len(self._started) < self._wanted:
            return EndOfStart(TERMINATED, "not all processes were started")
        return failed or self._failure() or EndOfStart(0, "all processes ended", is_told=True)

    def _failure(self) -> EndOfStart | None:
        codes = [child.process.poll() or 0 for child in self._started]
        failed = [(i, code) for i, code in enumerate(codes) if code]
        if not failed:
            return None
        # Who lost another process did not fail first.
        index, code = min(failed, key=lambda pair: pair[1] == LOST_A_PROCESS)
        is_told, code = code > 0, 128 - code if code < 0 else code
        return EndOfStart(code, f"process {index} ended with code {code}", is_told=is_told)

    def _hear(self, line: str) -> None:
        if line.startswith(_TOLD_ONCE):
            what = _OF_ANOTHER.sub("", line)
            with self._lock:
                if what in self._told:
                    return
                self._told.add(what)
        pass_on(line)


@contextlib.contextmanager
def _own_port() -> Iterator[int]:
    """A port of this machine that is free."""
    with socket.socket() as held:
        if sys.platform == "linux":
            # Process 0 can listen at a port that is bound here like that; others do not get it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        port = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()
        yield port
