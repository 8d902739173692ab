import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import SMALL, summary

from support.waiting import PATIENCE_SECONDS
from torch_compat.examples.train_torchrun import main

ROOT = Path(__file__).parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RATES = ("--steps", "40", "--learning-rate", "1e-2", "--base", "sgp")


def test_it_learns():
    call = [sys.executable, *TORCHRUN, "-m", "torch_compat.examples.train_torchrun"]
    text = subprocess.check_output(
        [*call, *SMALL, *RATES], cwd=ROOT, text=True, timeout=PATIENCE_SECONDS
    )
    assert summary(text).steps == 40
    assert summary(text).last_loss < 0.75 * summary(text).first_loss
    assert "(mean of 2 replicas)" in text


def test_not_by_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        main([])
