"""Models, data and steps that several tests share."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import slowmo_here as here
import torch

from torch_compat.errors import PeerLostError, UnlikeCallsError
from torch_compat.slowmo import SlowMoDistributedDataParallel, _steps

WIDTH, HIDDEN = 512, 1024  # a little more than a million parameters


class Perceptron(torch.nn.Module):
    """Two layers, the same on every device."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        for name, value in perceptron(width, hidden).items():
            setattr(self, name, torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


def perceptron(width: int, hidden: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(size=(width, hidden)) / width**0.5,
        "b1": np.zeros(hidden),
        "w2": rng.normal(size=(hidden, width)) / hidden**0.5,
        "b2": np.zeros(width),
    }


def batch(step: int, rank: int, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    x = rng.normal(size=(8, width)).astype(np.float32)
    return x, np.roll(x, 1, axis=1)


def take_step(net, optimizer, loss: torch.Tensor, **options) -> None:
    """What follows a forward pass in a script."""
    loss.backward()
    optimizer.step()
    net.zero_grad(set_to_none=True)
    net.perform_slowmo(optimizer, **options)
    here.launch()


def train_step(net, optimizer, step: int, width: int = WIDTH) -> None:
    """One step of this device on its own batch."""
    x, y = (torch.tensor(part).to(here.device()) for part in batch(step, here.rank(), width))
    take_step(net, optimizer, ((net(x) - y) ** 2).mean())


def values(module) -> dict[str, np.ndarray]:
    """Parameters and buffers on the host."""
    here.launch()
    return {key: value.detach().cpu().numpy().copy() for key, value in module.state_dict().items()}


WARNINGS: list[str] = []  # of all processes that are threads of this one


class Script:
    """A wrapped model and its training loop."""

    width = 4

    def __init__(self, *more: torch.nn.Module, **options: Any) -> None:
        # `warnings.catch_warnings` is no help: threads share it.
        _steps.warnings = SimpleNamespace(warn=lambda text, **_: WARNINGS.append(text))
        module = torch.nn.Sequential(Perceptron(self.width, 6), *more)
        self.net = SlowMoDistributedDataParallel(module.to(here.device()), **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def backward(self, t: int, module: torch.nn.Module | None = None) -> None:
        x, y = (torch.tensor(p).to(here.device()) for p in batch(t, here.rank(), self.width))
        (((module or self.net)(x) - y) ** 2).mean().backward()

    def update(self, calls: int = 1) -> None:
        self.optimizer.step()
        self.net.zero_grad()
        for _ in range(calls):
            self.net.perform_slowmo(self.optimizer)
        here.launch()

    def step(self, t: int, calls: int = 1) -> None:
        self.backward(t)
        self.update(calls)

    def run(self, steps: int, calls: Callable[[int], int] = lambda t: 1) -> tuple[str, list[str]]:
        """The error of a script with `calls(t)` calls after step t, and its warnings."""
        said = message_of(lambda: [self.step(t, int(calls(t))) for t in range(steps)])
        return said, [text for text in WARNINGS if f"process {here.rank()} of 2" in text]


def message_of(call: Callable[[], object]) -> str:
    """What the call says of other processes."""
    try:
        call()
    except (UnlikeCallsError, PeerLostError) as error:
        return str(error)
    return "no error"
