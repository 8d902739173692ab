"""The processes of a try, found by a mark in their environment, and how long all of them wait."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "JAXSLOWMO_TEST_TRY"
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 1.0
# Of a core, all trainers together: threads that look twice a second need a tenth of it.
_BUSY = 0.1


@dataclass(frozen=True)
class Process:
    """A living one.

    Attributes:
      pid: of it.
      is_trainer: the child that trains, and no parent or launcher.
      arguments: of its command line.
      cpu_seconds: that it has used.
    """

    pid: int
    is_trainer: bool
    arguments: tuple[str, ...]
    cpu_seconds: float

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
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        is_trainer = any(entry.startswith(b"JAXSLOWMO_CHILD=") for entry in environ)
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        found.append(Process(pid, is_trainer, tuple(arguments), cpu))
    return sorted(found, key=lambda process: process.pid)


class Silence(threading.Thread):
    """Measures the longest time in which there were trainers, and all of them waited.

    They wait where together they use nearly no processor and no file of the run changes. While
    there is no trainer, a supervisor waits before it starts some, which is no silence.

    Args:
      mark: of the processes.
      folder: gives that of the run's files.

    Attributes:
      longest: seconds.
    """

    def __init__(self, mark: str, folder: Callable[[], Path]) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self._mark, self._folder = mark, folder
        self._over = threading.Event()

    def stop(self) -> None:
        """Ends it."""
        self._over.set()
        self.join()

    def run(self) -> None:
        since = then = time.monotonic()
        cpu, files = self._cpu(), self._files()
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            cpu_then, files_then, cpu, files = cpu, files, self._cpu(), self._files()
            used = sum(cpu.values()) - sum(cpu_then.values())
            is_busy = used > _BUSY * (now - then)
            if not cpu or cpu.keys() != cpu_then.keys() or is_busy or files != files_then:
                since = now
            then = now
            self.longest = max(self.longest, now - since)

    def _cpu(self) -> Mapping[int, float]:
        return {p.pid: p.cpu_seconds for p in processes(self._mark) if p.is_trainer}

    def _files(self) -> list[tuple[str, int]]:
        found = []
        for folder, _, names in os.walk(self._folder()):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    found.append((path, os.stat(path).st_size))
                except OSError:
                    continue
        return sorted(found)
