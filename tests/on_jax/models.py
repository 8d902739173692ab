"""Modules that train, data for them, and how torch trains them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import jaxslowmo as js
from torch_compat import on_jax

TOLERANCE = 1e-5
SGD = optax.sgd(0.1)
VOCABULARY = 11


class Convolutions(nn.Module):
    """Both kinds of running statistics: by momentum and as plain means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.mean = nn.BatchNorm2d(8, momentum=None)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        return self.out(F.relu(self.mean(self.norm(self.conv(x)))).mean((2, 3)))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embed(x))))


class Counting(nn.Module):
    """Buffers of integers, booleans and bytes; some are read, some change, one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("mask", torch.arange(8) % 3 > 0, persistent=False)
        self.register_buffer("bytes", torch.arange(8, dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        x = (x * self.mask)[:, self.order] * (self.bytes.float() / 8 + 1) / self.calls
        y = self.linear(x)
        self.seen = 0.9 * self.seen + 0.1 * y.detach().mean(0)  # another tensor, not in place
        return y + self.seen


BATCH = 8


def images(steps: int, size: int = BATCH) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(size, 3, 5, 5)).astype(np.float32),
            "y": rng.integers(0, 4, size).astype(np.int32),
        }
        for _ in range(steps)
    ]


def rows(steps: int, size: int = BATCH) -> list[dict[str, np.ndarray]]:
    x = np.random.default_rng(1).normal(size=(steps, size, 8)).astype(np.float32)
    return [{"x": row, "y": row[:, :4].argmax(-1).astype(np.int32)} for row in x]


def tokens(steps: int, size: int = BATCH) -> list[dict[str, np.ndarray]]:
    x = np.random.default_rng(2).integers(0, VOCABULARY, (steps, size, 5)).astype(np.int32)
    return [{"x": t, "y": (t + 1) % VOCABULARY} for t in x]


def loss(module, batch):
    """Cross-entropy, and how many were right."""
    logits = module(batch["x"])
    right = (logits.argmax(-1) == batch["y"]).float().mean()
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten().long()), {"right": right}


def in_torch(batch: Any) -> Any:
    return jax.tree.map(torch.from_numpy, batch)


def assert_as_torch(
    module: nn.Module,
    loss: Callable[..., Any],
    batch: Any,
    tolerance: float = TOLERANCE,
    at_least: float = 1.0,
    part_of: Callable[[str], str] = lambda name: "",
) -> None:
    """Loss, metrics, gradients, and what the module holds after a call are those of torch.

    Gradients may be off by the tolerance times `at_least`, or times the largest of all parameters
    whose names have the same `part_of(name)`.
    """
    loss_fn, params, state = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    key = jax.random.key(0)
    (value, (metrics, state)), found = compute(params, batch, rng=key, model_state=state)
    result = loss(module, in_torch(batch))
    wanted, told = result if isinstance(result, tuple) else (result, {})
    for name, number in {**told, "loss": wanted}.items():
        error = abs(float({**metrics, "loss": value}[name]) - number.item())
        assert error <= tolerance * max(1, abs(number.item())), name
    wanted.backward()
    named = dict(module.named_parameters())
    zeros = {n: np.zeros(named[n].shape) for n in params}
    gradients = {n: zeros[n] if named[n].grad is None else named[n].grad.numpy() for n in params}
    assert found.keys() == gradients.keys()
    largest: dict[str, float] = {}
    for name, gradient in gradients.items():
        size = max([at_least, *np.abs(gradient).ravel()])
        largest[part_of(name)] = max(size, largest.get(part_of(name), 0.0))
    for name, gradient in gradients.items():
        atol = tolerance * largest[part_of(name)]
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)
    holds = held(module)
    assert_close(state, {n: holds[n] for n in state}, tolerance)


def step_of(
    module: nn.Module,
    of_batch: Callable[..., Any] = loss,
    *,
    replicas: int = 2,
    optimizer: Any = SGD,
    **options: Any,
) -> tuple[js.train.TrainStep, js.TrainState]:
    """A step with SGD for the module on so many devices, and its first state."""
    loss_fn, params, model_state = on_jax.as_loss(module, of_batch)
    mesh = js.make_mesh({"replica": replicas}, devices=jax.devices()[:replicas])
    step = js.make_train_step(loss_fn, optimizer, mesh=mesh, **options)
    return step, step.init(params, model_state=model_state)


def held(module: nn.Module) -> dict[str, np.ndarray]:
    """All that a module holds, by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: x.detach().numpy().copy() for name, x in tensors.items()}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = TOLERANCE):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), value, atol=tolerance, err_msg=name
        )
