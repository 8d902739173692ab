"""Models and batches of every kind: gradients are those of plain torch."""

import itertools
import math
from typing import NamedTuple

import numpy
import pytest
import torch
from models import TRACED_ONCE, PlainTorch, largest_difference, samples
from torch import nn

from torch_compat import TPUManager

DATA = samples(48)


def manager_of(model: nn.Module, data=DATA, **kwargs) -> TPUManager:
    options = {"nprocs": 2, "batch_size_per_device": 2, "start": True}
    return TPUManager(model, itertools.cycle(data), **{**options, **kwargs})


class Outputs(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


# Forms of a batch and of what a model returns.
BATCHES = {
    "numpy": lambda sample: sample["x"].numpy(),
    "tuple": lambda sample: (sample["x"], sample["y"]),
    "dict": lambda sample: sample,
}
OUTPUTS = {
    "tensor": lambda loss: loss.reshape(1),
    "tuple": lambda loss: (loss, "logits"),
    "attribute": lambda loss: Outputs(torch.zeros(3), loss),
}


class Formed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.form = nn.Linear(64, 1), "tensor"

    def forward(self, x, y=None):
        target = 0.0 if y is None else y.mean(-1, keepdim=True)
        return OUTPUTS[self.form]((self.linear(x) - target).square().mean())


def test_forms_of_batches_and_outputs():
    data = [form(s) for i, form in enumerate(BATCHES.values()) for s in DATA[4 * i : 4 * i + 4]]
    model = Formed()
    reference = Formed()
    with manager_of(model, data) as manager:
        for number, (form, model.form) in enumerate(zip(BATCHES, OUTPUTS, strict=True)):
            part = torch.utils.data.default_collate(DATA[4 * number : 4 * number + 4])
            expected = reference(part["x"], part["y"] if form != "numpy" else None)
            expected.backward()
            loss, _ = manager.step()
            assert math.isclose(loss, expected.item(), abs_tol=1e-6), form
            gradients = [p.grad for p in reference.parameters()]
            assert largest_difference(manager.get_aggregated_gradients(), gradients) <= 1e-6, form


class Tied(nn.Module):
    """A weight is tied by the constructor, another one when the model is asked to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def tie_weights(self):
        self.third.weight = self.first.weight

    def forward(self, x, y):
        return ((self.third(self.second(self.first(x).tanh()).tanh()) - y).square().mean(),)


def test_tied_weights_stay_tied_after_updates():
    model = Tied()
    with manager_of(model) as manager:
        (weight,) = model.parameters()
        plain = PlainTorch(model)
        for number in range(3):
            loss, _ = manager.step()
            expected = plain.step(DATA[4 * number : 4 * number + 4])
            assert math.isclose(loss, expected, rel_tol=1e-5)
            (gradient,) = manager.get_aggregated_gradients()
            torch.testing.assert_close(gradient, *plain.gradients(), rtol=1e-5, atol=1e-5)
            with torch.no_grad():
                for parameter in (weight, *plain.model.parameters()):
                    parameter.sub_(0.01)
            manager.update_model_parameters(model.parameters())


class Tempered(nn.Module):
    """A model that computes by its mode, by a number and by a name; half of it is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 64)
        self.drop = nn.Dropout(0.5)
        self.temperature, self.distance = 2.0, "square"
        self.second.requires_grad_(False)
        self.limit, self.scales, self.data = math.nan, (1.0,) * 16, (0,) * 17

    def forward(self, x, y):
        out = self.second(self.drop(self.first(x)).relu()) / self.temperature
        return {"loss": getattr(out - y, self.distance)().mean() * self.scales[15]}


def test_what_is_set_on_the_model_after_the_start_reaches_the_replicas():
    model = Tempered()
    with manager_of(model) as manager:
        manager.step()
        model.eval()
        for turn in range(2):
            model.second.requires_grad_(turn == 0)
            model.first.requires_grad_(turn == 1)
            model.temperature, model.distance = 0.5 + turn, ("abs", "square")[turn]
            model.scales = (2.0 + turn,) * 16
            manager.zero_grad()
            plain = PlainTorch(model)
            loss, _ = manager.step()
            expected = plain.step(DATA[4 * turn + 4 : 4 * turn + 8])
            assert math.isclose(loss, expected, rel_tol=1e-5)
            for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
                expected = theirs.grad if theirs.requires_grad else torch.zeros_like(theirs)
                assert expected.any() == theirs.requires_grad
                torch.testing.assert_close(ours.grad, expected)
        model.temperature, model.data = numpy.float32(1.5), (1,) * 17  # the same, and no setting
        manager.step()
        assert manager.statistics.compilations == 0, "nothing has been set since the last step"


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x, y):
        self.scratch += 1
        return {"loss": (self.linear(self.norm(x)) - y).square().mean()}


def test_buffers_come_back_from_device_0_and_go_out_with_the_parameters():
    model = Normalised()
    plain = PlainTorch(model)
    with manager_of(model, batch_size_per_device=4) as manager:
        for number in range(2):
            manager.step()
            # Samples 0, 2, 4, 6 of each step went to device 0.
            plain.step(DATA[8 * number : 8 * number + 8 : 2])
        ours, theirs = model.norm, plain.model.norm
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
        if TRACED_ONCE:
            torch.testing.assert_close(ours.running_var, theirs.running_var)
        else:
            # torch_xla's running variance is that of the batch, torch's is divided by one less.
            assert (ours.running_var != 1).all()
            assert (ours.running_var < theirs.running_var).all()
        assert not model.scratch.any()
        model.norm.running_mean.fill_(5.0)
        manager.update_model_parameters(model.parameters())
        manager.step()
        assert (model.norm.running_mean - 4.5).abs().max() < 0.5
        assert int(model.norm.num_batches_tracked) == 3


INTEGERS = (torch.uint8, torch.int64, torch.bool)


class Frozen(nn.Module):
    """Frozen parameters of all kinds, and tensors some elements of which share memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        whole = {str(dtype)[6:]: torch.ones(64).to(dtype) for dtype in INTEGERS}
        rows = torch.arange(128.0) / 128
        views = {
            "expanded": rows[5:6].expand(64),
            "strided": rows[::2],
            "overlapping": rows.as_strided((32, 64), (1, 1)),
        }
        for name, value in {**whole, **views}.items():
            self.register_parameter(f"of_{name}", nn.Parameter(value, requires_grad=False))
            self.register_buffer(f"with_{name}", value.clone() if name in whole else value)
        self.register_buffer("counts", torch.zeros(1).expand(64))

    def forward(self, x, y):
        self.counts = self.counts + torch.arange(64.0, device=x.device)
        parts = [p for p in [*self.parameters(), *self.buffers()] if not p.requires_grad]
        scale = sum(part.float().reshape(-1, 64).sum(0) for part in parts)
        return {"loss": (self.linear(x) * scale - y).square().mean()}


def test_frozen_integers_and_tensors_whose_elements_share_memory():
    model = Frozen()
    plain = PlainTorch(model)
    with manager_of(model, nprocs=1) as manager:
        for number in range(2):
            loss, _ = manager.step()
            expected = plain.step(DATA[2 * number : 2 * number + 2])
            assert math.isclose(loss, expected, rel_tol=1e-5)
            for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
                expected = theirs.grad if theirs.requires_grad else torch.zeros_like(theirs)
                torch.testing.assert_close(ours.grad, expected, rtol=1e-4, atol=1e-3)
            manager.update_model_parameters(model.parameters())
        ours, theirs = model.state_dict(), plain.model.state_dict()
        torch.testing.assert_close(ours, theirs)


def test_half_precision():
    dtype = torch.bfloat16
    model = Formed().to(dtype)
    reference = Formed().to(dtype).double()  # the rounded parameters, exact arithmetic
    data = [sample["x"].to(dtype) for sample in DATA[:4]]
    expected = reference(torch.stack(data).double())
    expected.backward()
    with manager_of(model, data) as manager:
        loss, _ = manager.step()
        found = manager.get_aggregated_gradients()
    epsilon = torch.finfo(dtype).eps
    assert math.isclose(loss, expected.item(), rel_tol=4 * epsilon)
    for ours, theirs in zip(found, reference.parameters(), strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - theirs.grad).abs().max()
        assert error <= 8 * epsilon * theirs.grad.abs().max()


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x):
        return (nn.functional.dropout(self.weight, 0.5).sum() * 1.0,)


def test_dropout_differs_between_devices_and_repeats_with_the_seed():
    def gradient(seed: int) -> torch.Tensor:
        with manager_of(Random(), [sample["x"] for sample in DATA], seed_base=seed) as manager:
            manager.step()
            return manager.get_aggregated_gradients()[0]

    mean = gradient(1)
    # Two devices that dropped the same elements would leave 0 and 2 only.
    assert set(mean.tolist()) == {0.0, 1.0, 2.0}
    assert torch.equal(mean, gradient(1))
    assert not torch.equal(mean, gradient(2))


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


def of_sample(samples: list[torch.Tensor]) -> dict:
    """What says of itself, by its length, how it is called."""
    scale, name = (2, "y") if len(samples[0]) > 4 else (1, "x")
    return {"x": torch.stack(samples), "scale": scale, "name": name}


def test_devices_whose_batches_differ_in_shape_and_structure():
    model, reference = Pooled(), Pooled()
    data = sequences(3, 5, 5, 5, 5, 3)
    with manager_of(model, data, batch_size_per_device=1, collate_fn=of_sample) as manager:
        for step in range(3):
            loss, count = manager.step()
            assert count == 2
            batches = [of_sample([sample]) for sample in data[2 * step : 2 * step + 2]]
            expected = sum(reference(**batch)["loss"] for batch in batches) / 2
            expected.backward()
            assert loss == pytest.approx(expected.item(), abs=1e-6)
        gradients = manager.get_aggregated_gradients()
    assert largest_difference(gradients, [p.grad for p in reference.parameters()]) < 1e-6
    assert model.calls == 3  # of device 0


class ResNet(nn.Module):
    """Convolutions without biases, a batch norm after each, and a sum with what was before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.Conv2d(16, 16, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.inner = nn.Sequential(
            inner[0], nn.BatchNorm2d(16), nn.ReLU(), inner[1], nn.BatchNorm2d(16)
        )
        self.past, self.head = nn.Conv2d(8, 16, 1, 2, bias=False), nn.Linear(16, 4)

    def forward(self, x, y):
        x = self.stem(x)
        x = torch.relu(self.inner(x) + self.past(x)).mean((2, 3))
        return {"loss": nn.functional.cross_entropy(self.head(x), y)}


def test_a_resnet_trains_as_in_plain_torch():
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [{"x": x, "y": torch.tensor(i % 4)} for i, x in enumerate(images)]
    model = ResNet()
    plain = PlainTorch(model)
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.05)
    with manager_of(model, data, nprocs=1, batch_size_per_device=8) as manager:
        for number in range(3):
            loss, _ = manager.step()
            expected = plain.step(data[number * 8 : number * 8 + 8])
            assert math.isclose(loss, expected, rel_tol=2e-5)
            found = manager.get_aggregated_gradients()
            assert largest_difference(found, plain.gradients()) <= 2e-4
            optimizer.step()
            manager.update_model_parameters([*plain.model.parameters()])
            manager.zero_grad()
            optimizer.zero_grad()
