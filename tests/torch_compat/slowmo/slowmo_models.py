"""Models, data and steps that several tests share."""

import numpy as np
import slowmo_here as here
import torch

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
