"""Stand-ins for the processes of a run, and what else runs with them."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Fake:
    """A program that notes its arguments, then does what a script says.

    Attributes:
      path: of the program.
    """

    def __init__(self, path: Path, script: str) -> None:
        self.path = str(path)
        path.write_text(f'#!/bin/sh\necho "$@" >> "$0.starts"\n{script}\n')
        path.chmod(0o755)

    def starts(self) -> list[str]:
        """The arguments of every start."""
        return self.lines("starts")

    def lines(self, name: str) -> list[str]:
        """What the script has written to "$0.NAME"."""
        written = Path(f"{self.path}.{name}")
        return written.read_text().splitlines() if written.exists() else []


@contextlib.contextmanager
def ended_together(process: subprocess.Popen) -> Iterator[None]:
    """Within it the process runs; not longer."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def pids_with(argument: object) -> list[int]:
    """The processes of this machine that have something in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(argument).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
