"""A real task with model state: the example divides the digits and learns to read them."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.waiting import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"


def test_shares_are_disjoint_and_nothing_is_lost():
    digits = runpy.run_path(str(SCRIPT))
    split = digits["split_digits"](4)
    parts = [*split.shares, split.held_out]
    assert [len(labels) for _, labels in parts] == [360, 359, 359, 359, 360]
    tagged = digits["load_digits"]().images.reshape(-1, 64) / 16
    seen = np.concatenate([images.reshape(-1, 64) for images, _ in parts])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, tagged.astype(np.float32)))


@pytest.mark.usefixtures("quick_processes")
def test_the_script_trains_slowmo_and_prints_its_accuracy():
    command = [sys.executable, str(SCRIPT), "--algorithm", "slowmo", "--steps", "100"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, run.stderr
    name, percent = run.stdout.split("%")[0].split(": ")
    assert name == "slowmo"
    assert float(percent) > 95
