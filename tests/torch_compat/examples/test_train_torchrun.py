import pytest
import torch
from example_runs import torchrun

from torch_compat.examples.train_torchrun import join, main


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


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"`--nproc-per-node` .* 1"):
        join()
