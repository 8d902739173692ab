"""Runs of a program in two real processes that jax.distributed joins, with CPU devices."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.quick import QUICK_COMPILER
from support.waiting import PATIENCE_SECONDS

# Several threads of gloo write at once, each line in parts.
_OF_RUNTIME = re.compile(r"\[Gloo\]|.*peer ranks|[IWE]\d{4} ")
_HEAD = """
import sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=300)
"""


def two_processes(
    program: str, folder: Path, seconds: float = PATIENCE_SECONDS, code: int = 0, devices: int = 1
) -> list[str]:
    """Run `program` in two processes; return what each prints, without the runtime's lines.

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
    outputs = [folder / f"printed{rank}" for rank in range(2)]
    with contextlib.ExitStack() as files:
        started = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(port), str(devices)],
                stdout=files.enter_context(out.open("w")),
                stderr=subprocess.STDOUT,
                env=os.environ | {"XLA_FLAGS": QUICK_COMPILER},
            )
            for rank, out in enumerate(outputs)
        ]
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    printed = [out.read_text() for out in outputs]
    assert codes == [code, code], printed
    return [
        "".join(line for line in text.splitlines(True) if not _OF_RUNTIME.match(line))
        for text in printed
    ]
