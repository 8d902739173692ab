"""One process per host: started together, ended together, never waited for without a limit."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from namespaces import Host


class ProcessFailed(RuntimeError):
    """A process left with another code than 0, or they took too long together."""


@dataclass(frozen=True)
class Started:
    """The processes of `running`, one per command.

    Attributes:
      processes: on the hosts, in their order.
      folder: of `out0`, `err0` and so on: what they have written so far.
    """

    processes: list[subprocess.Popen]
    folder: Path

    def out(self, index: int) -> str:
        """What a process has printed so far."""
        return (self.folder / f"out{index}").read_text(errors="replace")

    def err(self, index: int) -> str:
        """Likewise on its standard error."""
        return (self.folder / f"err{index}").read_text(errors="replace")

    def wait(self, seconds: float) -> list[str]:
        """What each has printed, when all have left with 0.

        Raises:
          ProcessFailed: one has left with another code, or `seconds` are over. All are killed, and
            the message tells what they wrote.
        """
        deadline = time.monotonic() + seconds
        while True:
            codes = [process.poll() for process in self.processes]
            if any(codes):
                self.fail(codes, "a process failed")
            if all(code == 0 for code in codes):
                return [self.out(i) for i in range(len(codes))]
            if time.monotonic() > deadline:
                self.fail(codes, f"not done after {seconds:.0f} s")
            time.sleep(0.05)

    def fail(self, codes: list[int | None], what: str) -> None:
        self.kill()
        told = [
            f"process {i}: {'killed' if code is None else code}\n"
            f"{self.out(i)[-1000:]}{self.err(i)[-3000:]}"
            for i, code in enumerate(codes)
        ]
        raise ProcessFailed("\n".join([what, *told]))

    def kill(self) -> None:
        """End all that still run, and wait until they are gone."""
        for process in self.processes:
            process.kill()  # does nothing once it has been waited for
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def running(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[Started]:
    """One command on each host; at the end all are killed that still run.

    Args:
      hosts: at least as many as there are commands.
      commands: programs with their arguments.
      folder: for what they write; made if it is not there.
      env: added to this process's environment, of which XLA_FLAGS and proxies are left out.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.lower().endswith("_proxy")
    }
    folder.mkdir(parents=True, exist_ok=True)
    started = Started([], folder)
    try:
        with contextlib.ExitStack() as files:
            for i, (host, command) in enumerate(zip(hosts, commands, strict=False)):
                out, err = (
                    files.enter_context((folder / f"{kind}{i}").open("w"))
                    for kind in ("out", "err")
                )
                # `ip netns exec` becomes the command, so the process is the command's own.
                process = subprocess.Popen(
                    [*host.command, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=own | dict(env or {}),
                    # Ctrl-C is for the parent, which then ends these.
                    start_new_session=True,
                )
                started.processes.append(process)
        yield started
    finally:
        started.kill()


def run(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """What the commands print, when all have left with 0; see `running` and `Started.wait`."""
    with running(hosts, commands, folder, env) as started:
        return started.wait(seconds)
