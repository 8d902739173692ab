"""The program on the documentation's page runs as it is, and learns."""

import os
import subprocess
import sys
from pathlib import Path

from recipes.doc_blocks import num_blocks, sections
from support.waiting import PATIENCE_SECONDS


def test_the_program(tmp_path: Path):
    (program,) = sections("torch-on-jax")[""]
    assert num_blocks("torch-on-jax") == 1
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share, word = done.stdout.split()
    assert word == "right"
    assert 80 < int(share.rstrip("%")) <= 100
