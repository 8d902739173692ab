"""Models and samples for the tests, and what plain torch makes of them."""

import copy
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# torchax calls a model's Python code once for each shape of batches, torch_xla in every step.
TRACED_ONCE = importlib.util.find_spec("torch_xla") is None

Sample = dict[str, torch.Tensor]


class Regressor(nn.Module):
    """854 thousand to 1.1 million parameters: toy sizes hide the deadlocks."""

    def __init__(self, width: int = 580):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), *self._block(width), *self._block(width)
        )
        self.out = nn.Linear(width, 64)
        self.unused = nn.Parameter(torch.ones(3))

    @staticmethod
    def _block(width: int) -> list[nn.Module]:
        return [nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.out(self.layers(x)) - y).square().mean()}


def regressor(seed: int = 0, **kwargs: Any) -> Regressor:
    torch.manual_seed(seed)
    return Regressor(**kwargs)


def samples(count: int, seed: int = 1, features: int = 64) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(count, 2, features, generator=generator)
    return [{"x": pair[0].clone(), "y": pair[1].clone()} for pair in draw]


class PlainTorch:
    """The same model on the host: the loss and the gradients that the devices must return."""

    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model)
        self.model.zero_grad(set_to_none=True)

    def step(self, batch: Iterable[Sample]) -> float:
        """Forward and backward over all samples at once; gradients add up."""
        stacked = torch.utils.data.default_collate(list(batch))
        outputs = self.model(**stacked)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss.backward()
        return loss.item()

    def gradients(self) -> list[torch.Tensor]:
        return [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.model.parameters()
        ]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        (a.float() - b.float()).abs().max().item() for a, b in zip(ours, theirs, strict=True)
    )
