"""Runs of the example programs, each in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
SMALL = ("--width", "48", "--layers", "1", "--heads", "2", "--length", "32")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Programs that run for seconds are compiled for longer than that if they are to be fast.
XLA_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
SUMMARY = re.compile(r"validation loss ([\d.]+) -> ([\d.]+) .*in (\d+) steps, ([\d.]+) samples/s")


class Summary(NamedTuple):
    """The last line that an example prints."""

    first_loss: float
    last_loss: float
    steps: int
    samples_per_second: float
    output: str


@contextmanager
def start(
    program: str,
    *arguments: str,
    given: tuple[str, ...] = ("--cpu-devices", "2", *SMALL),
    by: tuple[str, ...] = (),
) -> Iterator[subprocess.Popen]:
    """Start torch_compat.examples.<program> with small sizes; its output is one text.

    It ends with the context, if not before. `by` is another module, with its arguments, that
    starts the program.
    """
    module = f"torch_compat.examples.{program}"
    with subprocess.Popen(
        [sys.executable, *by, "-m", module, *given, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": XLA_FLAGS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, for signals
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run(program: str, *arguments: str, **how: tuple[str, ...]) -> Summary:
    """Run it to its end, which must be a good one."""
    with start(program, *arguments, **how) as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return summary(output)


def summary(output: str) -> Summary:
    """What the program says about its run."""
    found = SUMMARY.search(output)
    assert found is not None, output
    return Summary(float(found[1]), float(found[2]), int(found[3]), float(found[4]), output)


def torchrun(program: str, *arguments: str) -> Summary:
    """Run it by torchrun, in two processes."""
    return run(program, *arguments, by=TORCHRUN, given=SMALL)
