"""The programs on the documentation's page run as they are, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE_SECONDS

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def run(program: str, folder: Path) -> list[str]:
    """The lines that it prints."""
    script = folder / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    environment.pop("CPU_NUM_DEVICES", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_manager(tmp_path: Path):
    program, _ = programs("tpu-manager.md")
    steps = [line.split() for line in run(program, tmp_path)]
    assert [step[:2] for step in steps] == [["50", "64"], ["100", "64"], ["150", "64"]]
    assert float(steps[-1][2]) < 0.05


def test_padded_batches_compile_no_more(tmp_path: Path):
    _, program = programs("tpu-manager.md")
    (line,) = run(program, tmp_path)
    assert re.fullmatch("compiled in steps 1 to 20: [45], after that: 0", line)


@pytest.mark.parametrize("page", ["torch-xla.md", "torch.md"])
def test_slowmo(tmp_path: Path, page: str):
    (program,) = programs(page)
    line = run(program, tmp_path)[-1]
    assert line.startswith("loss of process 0 of 2: ")
    assert float(line.split()[-1]) < 0.1


@pytest.mark.parametrize("page", ["torch.md", "torch-xla.md", "tpu-manager.md"])
def test_a_page_says_what_differs_from_ddp_right_after_its_first_program(page: str):
    first, *_ = (ROOT / "docs" / page).read_text().partition("\n## ")
    _, _, after = first.partition("```python")
    assert '!!! note "What differs from DDP"' in after
