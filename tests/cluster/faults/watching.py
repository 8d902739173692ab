"""The processes of a try, found by a mark in their environment."""

import os
from dataclasses import dataclass
from pathlib import Path

MARK = "JAXSLOWMO_TEST_TRY"


@dataclass(frozen=True)
class Process:
    """A living one.

    Attributes:
      pid: of it.
      is_trainer: the child that trains, and no parent or launcher.
      arguments: of its command line.
    """

    pid: int
    is_trainer: bool
    arguments: tuple[str, ...]

    @property
    def index(self) -> int | None:
        """Its `--process-id`."""
        if "--process-id" not in self.arguments:
            return None
        return int(self.arguments[self.arguments.index("--process-id") + 1])


def processes(mark: str) -> list[Process]:
    """All that have the mark, whoever is their parent by now; those that have ended are not."""
    own = f"{MARK}={mark}".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            # Of one that has ended and that nobody has waited for it is empty.
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if own not in environ:
                continue
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        is_trainer = any(entry.startswith(b"JAXSLOWMO_CHILD=") for entry in environ)
        found.append(Process(pid, is_trainer, tuple(arguments)))
    return sorted(found, key=lambda process: process.pid)
