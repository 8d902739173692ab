"""The programs on the documentation's page run as they are, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE_SECONDS

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torch.md").read_text(), re.DOTALL)


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


def test_there_are_three_programs():
    assert len(PROGRAMS) == 3


def test_manager(tmp_path: Path):
    (program,) = (text for text in PROGRAMS if "TPUManager(" in text)
    steps = [line.split() for line in run(program, tmp_path)]
    assert [step[:2] for step in steps] == [["50", "64"], ["100", "64"], ["150", "64"]]
    assert float(steps[-1][2]) < 0.05


@pytest.mark.parametrize("start", ["xmp.spawn(", "mp.spawn(train, args=(2"])
def test_slowmo(tmp_path: Path, start: str):
    (program,) = (text for text in PROGRAMS if start in text)
    line = run(program, tmp_path)[-1]
    assert line.startswith("loss of process 0 of 2: ")
    assert float(line.split()[-1]) < 0.1
