import pytest
import torch

from torch_compat.examples.train_torchrun import join, main, parse


@pytest.mark.parametrize("base", ["localsgd", "sgp"])
def test_it_learns(torchrun, base):
    summary = torchrun("train_torchrun", "--steps", "64", "--learning-rate", "5e-3", "--base", base)
    assert summary.steps == 64
    assert summary.last_loss < 0.75 * summary.first_loss
    assert "(mean of 2 replicas)" in summary.output


def test_not_by_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="Start this program by torchrun"):
        main([])


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="`--nproc-per-node` must be at most the GPUs here, 1"):
        join()


def test_it_has_no_cpu_devices(capsys):
    with pytest.raises(SystemExit):
        parse(["--cpu-devices", "2"])
    assert "unrecognized arguments: --cpu-devices 2" in capsys.readouterr().err
