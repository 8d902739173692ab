"""The algorithms in NumPy and float64, replicas as the leading axis; no jax, no shared code."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Outer:
    """An outer step every `every` updates, as in design: m in units of gradients."""

    every: int
    momentum: float = 0.0
    rate: float = 1.0
    nesterov: bool = False
    exact: bool = True
    gamma: Callable[[int], float] = lambda t: 1.0  # of the 0-based update count


def mean(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.mean(0, keepdims=True), x.shape)


def train(
    params: np.ndarray,
    grads: np.ndarray,
    *,
    learning_rate: Callable[[int], float],
    inner_momentum: float = 0.0,
    average_every: int | None = None,
    outer: Outer | None = None,
) -> np.ndarray:
    """SGD with momentum on every replica, averages and outer steps between.

    Args:
      params: `[replicas, ...]`.
      grads: `[steps, replicas, ...]`.
      learning_rate: of the 0-based update count.
      inner_momentum: of torch's and optax's SGD.
      average_every: LocalSGD period.
      outer: slow momentum or DiLoCo.

    Returns:
      `[steps, replicas, ...]` after every update.
    """
    x = params.astype(np.float64)
    trace, anchor = np.zeros_like(x), x.copy()
    velocity, gamma_before = np.zeros_like(x), 1.0  # velocity = gamma * m
    history = []
    for step, grad in enumerate(grads.astype(np.float64)):
        trace = inner_momentum * trace + grad
        x = x - learning_rate(step) * trace
        slow = outer is not None and (step + 1) % outer.every == 0
        if average_every and (step + 1) % average_every == 0 and not (slow and outer.exact):
            x = mean(x)
        if slow:
            gamma = outer.gamma(step)
            displacement = anchor - (mean(x) if outer.exact else x)
            rescale = 1.0 if gamma_before == 0 else gamma / gamma_before
            velocity = outer.momentum * rescale * velocity + displacement
            gamma_before = gamma
            ahead = outer.momentum * velocity + displacement if outer.nesterov else velocity
            anchor = anchor - outer.rate * ahead
            x = anchor.copy()
        history.append(x.copy())
    return np.stack(history)
