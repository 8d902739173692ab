"""Stand-ins for the processes of a run, and functions that find and end processes."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Fake:
    """A program that records its arguments, then runs a script.

    Attributes:
      path: path of the program.
    """

    def __init__(self, path: Path, script: str) -> None:
        self.path = str(path)
        path.write_text(f'#!/bin/sh\necho "$@" >> "$0.starts"\n{script}\n')
        path.chmod(0o755)

    def starts(self) -> list[str]:
        """Return the arguments of every start."""
        return self.lines("starts")

    def lines(self, name: str) -> list[str]:
        """Return the lines that the script has written to "$0.NAME"."""
        written = Path(f"{self.path}.{name}")
        return written.read_text().splitlines() if written.exists() else []


@contextlib.contextmanager
def ended_together(process: subprocess.Popen) -> Iterator[None]:
    """Kill the process at the end of the block."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def pids_with(argument: object) -> list[int]:
    """Return the ids of this machine's processes whose command lines hold `argument`."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(argument).encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return pids
