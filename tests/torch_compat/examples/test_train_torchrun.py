import pytest
from example_runs import torchrun

from torch_compat.examples.train_torchrun import main


def test_it_learns():
    rates = ("--learning-rate", "5e-3", "--base", "sgp")
    summary = torchrun("train_torchrun", "--steps", "64", *rates)
    assert summary.steps == 64
    assert summary.last_loss < 0.75 * summary.first_loss
    assert "(mean of 2 replicas)" in summary.output


def test_not_by_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        main([])
