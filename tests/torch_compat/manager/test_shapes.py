"""Batches that change: over steps, and from device to device."""

import itertools

import pytest
import torch
from models import largest_difference, samples
from torch import nn

from torch_compat import TPUManager

DATA = samples(16)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1, name="x"):
        assert isinstance(scale, int)
        assert name in ("x", "y")
        self.calls += 1
        return {"loss": self.linear(x.mean(1)).square().mean() * scale}


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, 64, generator=generator) for length in lengths]


def manager_of(model: nn.Module, data, **kwargs) -> TPUManager:
    return TPUManager(model, itertools.cycle(data), **{"start": True, **kwargs})


def mean_of(model: nn.Module, batches: list[dict]) -> float:
    """What a step over one batch for each device gives; adds to the gradients."""
    loss = sum(model(**batch)["loss"] for batch in batches) / len(batches)
    loss.backward()
    return loss.item()


def of_sample(samples: list[torch.Tensor]) -> dict:
    """What says of itself, by its length, how it is called."""
    scale, name = (2, "y") if len(samples[0]) > 4 else (1, "x")
    return {"x": torch.stack(samples), "scale": scale, "name": name}


def test_devices_whose_batches_differ_in_shape_and_structure():
    model, reference = Pooled(), Pooled()
    data = sequences(3, 5, 5, 5, 5, 3)
    with manager_of(model, data, nprocs=2, collate_fn=of_sample) as manager:
        for step in range(3):
            loss, count = manager.step()
            assert count == 2
            batches = [of_sample([sample]) for sample in data[2 * step : 2 * step + 2]]
            assert loss == pytest.approx(mean_of(reference, batches), abs=1e-6)
        gradients = manager.get_aggregated_gradients()
    assert largest_difference(gradients, [p.grad for p in reference.parameters()]) < 1e-6
    assert model.calls == 3  # of device 0


def test_a_new_shape_compiles_once():
    with manager_of(Pooled(), sequences(3, 5, 3, 5), nprocs=1) as manager:
        compiled = [(manager.step(), manager.statistics.compilations)[1] for _ in range(6)]
    assert compiled[0] >= 1
    assert compiled[1] >= 1
    assert compiled[2:] == [0] * 4


def test_float64_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return (self.inner(x).square().mean(),)

    data = [sample["x"].double() for sample in DATA]
    loss = Loss()
    (expected,) = loss(torch.stack(data[:4]))
    gradients = torch.autograd.grad(expected, list(loss.parameters()))
    with manager_of(loss, data, nprocs=2, batch_size=2) as manager:
        assert manager.step()[0] == pytest.approx(expected.item(), abs=1e-14)
        found = manager.get_aggregated_gradients()
    for ours, theirs in zip(found, gradients, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_no_number_of_devices_is_all_there_are():
    with manager_of(Pooled(), sequences(3), nprocs=None) as manager:
        assert manager.step()[1] == 1
        assert manager.nprocs == 1
