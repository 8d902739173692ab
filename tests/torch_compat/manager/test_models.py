"""Models and batches of every kind: gradients are those of plain torch."""

import math
from typing import NamedTuple

import pytest
import torch
from models import TRACED_ONCE, PlainTorch, largest_difference, regressor, samples
from torch import nn

from torch_compat import TPUManager

DATA = samples(64)
X = [sample["x"] for sample in DATA]


def train(model: nn.Module, data=DATA, steps: int = 2, **kwargs) -> tuple[list[float], TPUManager]:
    options = {"nprocs": 2, "batch_size_per_device": 2, "start": True, **kwargs}
    with TPUManager(model, data, **options) as manager:
        return [manager.step()[0] for _ in range(steps)], manager


def check(model: nn.Module, steps: int = 2, tolerance: float = 1e-6, **kwargs) -> PlainTorch:
    plain = PlainTorch(model)
    losses, manager = train(model, steps=steps, **kwargs)
    for number, loss in enumerate(losses):
        expected = plain.step(DATA[4 * number : 4 * number + 4])
        assert math.isclose(loss, expected, abs_tol=tolerance)
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) <= tolerance
    return plain


class Outputs(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner, self.form = regressor(width=32), form

    def forward(self, x, y):
        return self.form(self.inner(x, y)["loss"])


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: (loss, "logits"),
        lambda loss: [loss],
        lambda loss: loss.reshape(1),
        lambda loss: Outputs(torch.zeros(3), loss),
    ],
    ids=["tuple", "list", "tensor", "attribute"],
)
def test_forms_of_outputs(form):
    plain = PlainTorch(regressor(width=32))
    losses, manager = train(Returns(form), steps=1)
    assert math.isclose(losses[0], plain.step(DATA[:4]), abs_tol=1e-6)
    assert largest_difference(manager.get_aggregated_gradients(), plain.gradients()) <= 1e-6


class OfOneTensor(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 1)

    def forward(self, x, y=None, *, scale=1):
        assert isinstance(scale, int)
        target = 0.0 if y is None else y.mean(-1, keepdim=True)
        return (self.linear(x) - target).square().mean() * scale


@pytest.mark.parametrize(
    ("data", "collate", "with_y"),
    [
        (X, None, False),
        ([(s["x"], s["y"]) for s in DATA], None, True),
        ([[s["x"], s["y"]] for s in DATA], None, True),
        (DATA, None, True),
        (DATA, lambda batch: {**torch.utils.data.default_collate(batch), "scale": 1}, True),
        (DATA, lambda batch: torch.stack([s["x"] for s in batch]), False),
        ([s["x"].numpy() for s in DATA], None, False),
    ],
    ids=["tensor", "tuple", "list", "dict", "collated dict", "collated tensor", "numpy"],
)
def test_forms_of_batches(data, collate, with_y: bool):
    model = OfOneTensor()
    reference = OfOneTensor()
    y = torch.stack([s["y"] for s in DATA[:4]]) if with_y else None
    expected = reference(torch.stack(X[:4]), y)
    expected.backward()
    losses, manager = train(model, data, steps=1, collate_fn=collate)
    assert math.isclose(losses[0], expected.item(), abs_tol=1e-6)
    gradients = [p.grad for p in reference.parameters()]
    assert largest_difference(manager.get_aggregated_gradients(), gradients) <= 1e-6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x, y):
        return ((self.second(self.first(x).tanh()) - y).square().mean(),)


class TiedByMethod(Tied):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def tie_weights(self):
        self.calls += 1
        self.second.weight = self.first.weight


@pytest.mark.parametrize("kind", [Tied, TiedByMethod])
def test_tied_weights_stay_tied_after_updates(kind: type[Tied]):
    model = kind()
    assert len(list(model.parameters())) == 3
    plain = PlainTorch(model)
    with TPUManager(model, DATA, nprocs=2, batch_size_per_device=2, start=True) as manager:
        for number in range(3):
            loss, _ = manager.step()
            expected = plain.step(DATA[4 * number : 4 * number + 4])
            assert math.isclose(loss, expected, rel_tol=1e-6)
            # Gradients grow to 40 here.
            gradients = manager.get_aggregated_gradients()
            assert largest_difference(gradients, plain.gradients()) <= 1e-5
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
                    theirs.sub_(0.1)
                    ours.sub_(0.1)
            manager.update_model_parameters(model.parameters())


def test_unused_and_frozen_parameters_have_zero_gradients():
    model = regressor(width=32)
    model.out.bias.requires_grad_(False)
    check(model)
    named = {name: p.grad for name, p in model.named_parameters()}
    assert not named["unused"].any()
    assert not named["out.bias"].any()
    assert named["out.weight"].any()


class Tempered(nn.Module):
    """A model that computes by its mode, by a number and by a name; half of it is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 64)
        self.drop = nn.Dropout(0.5)
        self.temperature, self.distance = 2.0, "square"
        self.second.requires_grad_(False)

    def forward(self, x, y):
        out = self.second(self.drop(self.first(x)).relu()) / self.temperature
        return {"loss": getattr(out - y, self.distance)().mean()}


def test_what_is_set_on_the_model_after_the_start_reaches_the_replicas():
    model = Tempered()
    with TPUManager(model, DATA, nprocs=2, batch_size_per_device=2, start=True) as manager:
        manager.step()
        model.eval()
        for turn in range(2):
            model.second.requires_grad_(turn == 0)
            model.first.requires_grad_(turn == 1)
            model.temperature, model.distance = 0.5 + turn, ("abs", "square")[turn]
            manager.zero_grad()
            plain = PlainTorch(model)
            loss, _ = manager.step()
            expected = plain.step(DATA[4 * turn + 4 : 4 * turn + 8])
            assert math.isclose(loss, expected, rel_tol=1e-5)
            for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
                expected = theirs.grad if theirs.requires_grad else torch.zeros_like(theirs)
                assert expected.any() == theirs.requires_grad
                torch.testing.assert_close(ours.grad, expected)
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


class WritesThroughViews(nn.Module):
    """In place: a layer's result through views of it, and the weight's values through `.data`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 4)

    def forward(self, x, y):
        self.linear.weight.data.mul_(0.5)
        h = self.linear(x)
        h.view(-1)[::2] *= 3.0
        h.t()[1].sin_()
        h.select(1, 2).add_(y.mean(-1))
        return {"loss": h.square().mean()}


def test_writes_through_views_reach_what_is_viewed():
    check(WritesThroughViews(), steps=1)


def test_buffers_come_back_from_device_0_and_go_out_with_the_parameters():
    model = Normalised()
    plain = PlainTorch(model)
    with TPUManager(model, DATA, nprocs=2, batch_size_per_device=4, start=True) as manager:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype):
    model = OfOneTensor().to(dtype)
    reference = OfOneTensor().to(dtype).float()  # the rounded parameters, exact arithmetic
    data = [x.to(dtype) for x in X]
    expected = reference(torch.stack(data[:4]).float())
    expected.backward()
    losses, manager = train(model, data, steps=1)
    epsilon = torch.finfo(dtype).eps
    assert math.isclose(losses[0], expected.item(), rel_tol=4 * epsilon)
    for ours, theirs in zip(
        manager.get_aggregated_gradients(), (p.grad for p in reference.parameters()), strict=True
    ):
        assert ours.dtype == dtype
        assert (ours.float() - theirs).abs().max() <= 8 * epsilon * theirs.abs().max()


def test_dropout_differs_between_devices_and_repeats_with_the_seed():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256))

        def forward(self, x):
            return (nn.functional.dropout(self.weight, 0.5).sum() * 1.0,)

    def gradient(seed: int) -> torch.Tensor:
        _, manager = train(Random(), X, steps=1, seed_base=seed)
        return manager.get_aggregated_gradients()[0]

    mean = gradient(1)
    # Two devices that dropped the same elements would leave 0 and 2 only.
    assert set(mean.tolist()) == {0.0, 1.0, 2.0}
    assert torch.equal(mean, gradient(1))
    assert not torch.equal(mean, gradient(2))
