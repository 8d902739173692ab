"""Programs in forks of this process, which has imported what takes them seconds."""

import multiprocessing as mp
import os
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

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
        self._out.touch()
        self._err.touch()
        environment = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": XLA_FLAGS, **environment}
        arguments = (program, arguments, folder, environment)
        self._process = mp.get_context("fork").Process(target=self._run, args=arguments)
        self._process.start()

    def _run(self, program: Path | str, arguments, folder: Path, environment) -> None:
        os.setsid()  # a group of its own, for signals
        for number, path in ((1, self._out), (2, self._err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        if xm := sys.modules.get("torch_xla.core.xla_model"):
            xm.master_print.__kwdefaults__["fd"] = sys.stdout  # not that of its import
        os.environ.pop("CPU_NUM_DEVICES", None)
        os.environ.update(environment)
        os.chdir(folder)
        warnings.resetwarnings()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        sys.argv = [str(program), *arguments]
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(f"torch_compat.examples.{program}", None, "__main__", alter_sys=True)

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
        wait_until(lambda: text in self.output or not self._process.is_alive())
        assert text in self.output
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self, code: int = 0) -> "Program":
        """Wait for its end with this exit code."""
        self._process.join(PATIENCE_SECONDS)
        assert self._process.exitcode == code, self.output
        return self

    def kill(self) -> None:
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)


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
