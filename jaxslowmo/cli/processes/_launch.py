"""`jaxslowmo launch`: the processes of a run on this machine, started again when one is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .._errors import DIVERGED, INTERRUPTED, LOST_A_PROCESS, USAGE_ERROR, CommandError
from ._launchers import LAUNCHED
from ._stop import handling
from ._supervise import last_saved

# Beyond the heartbeat: what survivors need to notice that a process is gone, and to end.
_GRACE_SECONDS = 10
_OWN = ("--coordinator", "--num-processes", "--process-id", "--restarts")


def launch(processes: int, restarts: int, heartbeat_timeout: int, command: Sequence[str]) -> int:
    """Runs `jaxslowmo train` in so many processes; 0 once all have ended well.

    When one fails, waits until the others have noticed and ended (kills those that do not), then
    starts all again with `--resume`, at most `restarts` times. Ctrl-C and SIGTERM are passed on.

    Args:
      processes: how many.
      restarts: how often to start again.
      heartbeat_timeout: of the processes, in seconds.
      command: "train" and its arguments; `--out` must be among them.

    Returns:
      0; or the code of the process that failed first, where there are no restarts left.

    Raises:
      CommandError: for a command that cannot be launched.
    """
    out = _checked(processes, command)
    arguments = [*command, "--heartbeat-timeout", str(heartbeat_timeout)]
    while True:
        group = _Group(processes, arguments)
        with handling({signal.SIGINT: group.pass_on, signal.SIGTERM: group.pass_on}):
            code = group.wait(heartbeat_timeout + _GRACE_SECONDS)
        if group.was_interrupted:
            return INTERRUPTED
        # Usage errors and divergence would only come back.
        if code in (0, DIVERGED, USAGE_ERROR) or not restarts:
            return code
        restarts -= 1
        print(
            f"launch: process {group.first_to_fail} ended with code {code}; {last_saved(out)}; "
            f"starting all again (restarts left: {restarts})",
            file=sys.stderr,
            flush=True,
        )
        if "--resume" not in arguments:
            arguments.append("--resume")


def _checked(processes: int, command: Sequence[str]) -> Path:
    if processes < 1:
        raise CommandError(f"--processes must be >= 1, got {processes}")
    if not command or command[0] != "train":
        given = " ".join(command) or "nothing"
        raise CommandError(f"launch runs: jaxslowmo launch ... -- train ...; got {given}")
    own = [name for name in _OWN for given in command if given.partition("=")[0] == name]
    if own:
        raise CommandError(f"{', '.join(own)} of train: launch decides it")
    outs = [
        given.partition("=")[2] or (list(command[i + 1 : i + 2]) or [""])[0]
        for i, given in enumerate(command)
        if given.partition("=")[0] == "--out"
    ]
    if not outs or not outs[-1]:
        raise CommandError("train needs --out where there are several processes: they share it")
    return Path(outs[-1])


class _Group:
    """One start of all processes."""

    def __init__(self, processes: int, arguments: Sequence[str]) -> None:
        self.was_interrupted = False
        self.first_to_fail: int | None = None
        coordinator = f"127.0.0.1:{_free_port()}"
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxslowmo", *arguments),
                    *("--coordinator", coordinator, "--num-processes", str(processes)),
                    *("--process-id", str(index)),
                ],
                env={**os.environ, LAUNCHED: "1"},
                # Ctrl-C reaches them through this process alone, once.
                start_new_session=True,
            )
            for index in range(processes)
        ]

    def wait(self, patience: float) -> int:
        """The code of the first process that failed, once all have ended; 0 if none did.

        Args:
          patience: seconds that the others get to end after that, before they are killed.
        """
        code, deadline = 0, None
        while any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
            if deadline is None:
                code = self._failure()
                deadline = time.monotonic() + patience if code else None
            elif time.monotonic() > deadline:
                self._send(signal.SIGKILL)
        return code or self._failure()

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM and Ctrl-C: to all processes; the second Ctrl-C kills them."""
        del frame
        again = self.was_interrupted and number == signal.SIGINT
        self.was_interrupted |= number == signal.SIGINT
        self._send(signal.SIGKILL if again else signal.SIGTERM)

    def _failure(self) -> int:
        failed = [(i, p.poll()) for i, p in enumerate(self._processes) if p.poll()]
        if not failed:
            return 0
        # Who lost another process did not fail first.
        index, code = min(failed, key=lambda pair: pair[1] == LOST_A_PROCESS)
        if self.first_to_fail is None:
            self.first_to_fail = index
        assert code is not None
        return 128 - code if code < 0 else code

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
