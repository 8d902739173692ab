"""Programs in fresh processes: a fork of one that has touched XLA can abort."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.waiting import PATIENCE_SECONDS, wait_until

SMALL = ("--width", "48", "--layers", "1", "--heads", "2", "--length", "32")
# Programs that run for seconds are compiled for longer than that if they are to be fast.
XLA_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
SUMMARY = re.compile(r"validation loss ([\d.]+) -> ([\d.]+) .*in (\d+) steps, ([\d.]+) samples/s")


class Program:
    """A file, or a module of the examples, that runs as `__main__` in a folder of its own."""

    def __init__(self, program: Path | str, *arguments: str, folder: Path, **environment: str):
        number = len(list(folder.iterdir()))
        self._out, self._err = (folder / f"{number}.{name}" for name in ("out", "err"))
        module = ("-m", f"torch_compat.examples.{program}")
        words = (str(program),) if isinstance(program, Path) else module
        given = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": XLA_FLAGS, "PYTHONUNBUFFERED": "1"}
        others = {n: x for n, x in os.environ.items() if n != "CPU_NUM_DEVICES"}
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, *words, *arguments],
                cwd=folder,
                env=others | given | environment,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a group of its own, for signals
            )

    @property
    def lines(self) -> list[str]:
        """What it has printed."""
        return self._out.read_text().splitlines()

    @property
    def output(self) -> str:
        """Its errors, too."""
        return self._out.read_text() + self._err.read_text()

    def interrupt_after(self, text: str) -> None:
        """Send Ctrl-C, as a terminal does, when it has said this."""
        wait_until(lambda: text in self.output or self._process.poll() is not None)
        assert text in self.output
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self, code: int = 0) -> "Program":
        """Wait for its end with this exit code."""
        assert self._process.wait(PATIENCE_SECONDS) == code, self.output
        return self

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def started(*arguments: str, **how) -> Iterator[Program]:
    """A program that ends with the context, if not before."""
    program = Program(*arguments, **how)
    try:
        yield program
    finally:
        program.kill()


class Summary(NamedTuple):
    """The last line that an example prints."""

    first_loss: float
    last_loss: float
    steps: int
    samples_per_second: float


def summary(output: str) -> Summary:
    """What the program says about its run."""
    found = SUMMARY.search(output)
    assert found is not None, output
    return Summary(float(found[1]), float(found[2]), int(found[3]), float(found[4]))
