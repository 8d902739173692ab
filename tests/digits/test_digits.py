"""A real task with model state: every algorithm learns to read digits."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
REPLICAS = {"replica": 4}


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shares_are_disjoint_and_nothing_is_lost(digits):
    split = digits.split_digits(4)
    parts = [*split.shares, split.held_out]
    assert [len(labels) for _, labels in parts] == [360, 359, 359, 359, 360]
    tagged = digits.load_digits().images.reshape(-1, 64) / 16
    seen = np.concatenate([images.reshape(-1, 64) for images, _ in parts])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, tagged.astype(np.float32)))


@pytest.mark.parametrize(
    ("algorithm", "model_state", "on"),
    sweep(
        [
            ("all_reduce", "sync_mean", "devices"),
            ("local_sgd", "local", "devices"),
            ("diloco", "broadcast", "virtual"),
        ],
        lambda algorithm, model_state, on: algorithm == "local_sgd",
    ),
)
def test_the_consensus_reads_digits(digits, algorithm, model_state, on):
    mesh = js.make_mesh(REPLICAS) if on == "devices" else js.virtual_mesh(REPLICAS)
    accuracy = digits.train(algorithm, mesh=mesh, model_state=model_state)
    assert accuracy > 0.95


@pytest.mark.usefixtures("quick_processes")
def test_the_script_trains_slowmo_and_prints_its_accuracy():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--algorithm", "slowmo"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    name, percent = run.stdout.split("%")[0].split(": ")
    assert name == "slowmo"
    assert float(percent) > 95
