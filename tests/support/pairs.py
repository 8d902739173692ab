"""Runs of a program in two real processes that jax.distributed joins, with CPU devices."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.quick import QUICK_COMPILER
from support.waiting import PATIENCE_SECONDS

# The runtime (gloo's threads, XLA's log) writes to the process's file descriptors, Python to a file
# of its own: what the program prints stays whole.
_HEAD = """
import sys
rank, port = int(sys.argv[1]), sys.argv[2]
sys.stdout = sys.stderr = open(sys.argv[4], "w", buffering=1)
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=300)
"""


def two_processes(
    program: str, folder: Path, seconds: float = PATIENCE_SECONDS, code: int = 0, devices: int = 1
) -> list[str]:
    """Run `program` in two processes; return what Python prints in each, errors included.

    Args:
      program: source of the program, in which `rank` is the index of the process.
      folder: folder for the program and its output.
      seconds: limit of the run.
      code: exit code that both must give.
      devices: CPU devices of each process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = folder / "program.py"
    script.write_text(_HEAD + program)
    printed = [folder / f"printed{rank}" for rank in range(2)]
    logs = [folder / f"runtime{rank}" for rank in range(2)]
    arguments = [str(port), str(devices)]
    with contextlib.ExitStack() as files:
        started = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), *arguments, str(printed[rank])],
                stdout=files.enter_context(logs[rank].open("w")),
                stderr=subprocess.STDOUT,
                env=os.environ | {"XLA_FLAGS": QUICK_COMPILER},
            )
            for rank in range(2)
        ]
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [code, code], [path.read_text() for path in printed + logs]
    return [path.read_text() for path in printed]
