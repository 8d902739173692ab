"""How `TPUManager` counts XLA devices, and when it may not have them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import regressor, samples
from torch import nn

from support.refusals import Refusal
from support.waiting import PATIENCE_SECONDS
from torch_compat import TPUManager, TPUWorkerError

DATA = samples(32)
ROOT = Path(__file__).parents[3]


def manager_of(model: nn.Module, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(DATA), **{"start": True, **kwargs})


def test_nprocs_of_old_scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with manager_of(regressor(width=32), nprocs=8) as manager:
        Refusal(manager.step, "`nprocs`", "got 8", TPUWorkerError).check()
    with manager_of(regressor(width=32), nprocs=None) as manager:
        assert manager.step()[1] == 2
        assert manager.nprocs == 2
    monkeypatch.setenv("CPU_NUM_DEVICES", "8")
    with manager_of(regressor(width=32), nprocs=8) as manager:
        assert manager.step()[1] == 8


def test_a_parent_that_has_touched_a_device_is_told_so():
    code = (
        "import torch, torch_xla\nfrom torch_compat import TPUManager\ntorch_xla.device()\n"
        "TPUManager(torch.nn.Linear(2, 2), [], start=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: This process has touched a device" in done.stderr
