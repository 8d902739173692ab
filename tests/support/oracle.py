"""The algorithms in NumPy and float64, with a leading axis of replicas and no shared code."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Outer:
    """An outer step every `every` updates, with the momentum m in units of gradients."""

    every: int
    momentum: float = 0.0
    rate: float = 1.0
    nesterov: bool = False
    exact: bool = True
    gamma: Callable[[int], float] = lambda t: 1.0  # of the 0-based update count


@dataclass
class Gossip:
    """Push-sum: numerators x = w * params, and u from outside, in every exchange

        x <- P (x + u)                         overlap 0
        x <- kept * x + what arrives + u       overlap k: what was sent k - 1 exchanges ago arrives

    and w alike, without u.
    """

    matrices: Sequence[np.ndarray]  # P[destination, source] of exchange 0, 1, ..., over and over
    overlap: int = 0

    def start(self, x: np.ndarray) -> "Nodes":
        late = max(0, self.overlap - 1)
        ones = np.ones((x.shape[0], *[1] * (x.ndim - 1)))
        return Nodes(self, ones, [(0 * x, 0 * ones) for _ in range(late)])


@dataclass
class Pairs:
    """NoLoCo: every `every` updates, with means of two replicas, the mixing of each exchange

    v <- alpha v + beta mean(theta - phi) - gamma (phi - mean(phi));   phi <- phi + v
    """

    matrices: Sequence[np.ndarray]
    every: int
    alpha: float
    beta: float
    gamma: float

    def start(self, x: np.ndarray) -> Callable[[int, np.ndarray], np.ndarray]:
        phi, v, exchanges = x.copy(), np.zeros_like(x), 0

        def exchange(t: int, theta: np.ndarray) -> np.ndarray:
            nonlocal phi, v, exchanges
            if t % self.every:
                return theta
            pair = self.matrices[exchanges % len(self.matrices)]
            ahead, centre = (np.einsum("ij,j...->i...", pair, y) for y in (theta - phi, phi))
            v = self.alpha * v + self.beta * ahead - self.gamma * (phi - centre)
            phi, exchanges = phi + v, exchanges + 1
            return phi.copy()

        return exchange


@dataclass
class Sample:
    """SPARTA: every `every` updates the mean of `places(t, size)` of a leaf's elements."""

    places: Callable[[int, int], np.ndarray]
    every: int

    def start(self, x: np.ndarray) -> Callable[[int, np.ndarray], np.ndarray]:
        def exchange(t: int, x: np.ndarray) -> np.ndarray:
            if t % self.every:
                return x
            flat = x.reshape(len(x), -1).copy()
            at = self.places(t, flat.shape[1])
            flat[:, at] = flat[:, at].mean(0)
            return flat.reshape(x.shape)

        return exchange


@dataclass
class Nodes:
    """The state of gossip: weights of the nodes and values in flight."""

    gossip: Gossip
    weight: np.ndarray  # [nodes, 1, ...]
    in_flight: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    exchanges: int = 0

    def exchange(self, params: np.ndarray, u: np.ndarray) -> np.ndarray:
        matrices = self.gossip.matrices
        p = matrices[self.exchanges % len(matrices)]
        self.exchanges += 1
        x, w = self.weight * params, self.weight

        def mix(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
            return np.einsum("ij,j...->i...", matrix, values)

        if self.gossip.overlap == 0:
            x, self.weight = mix(p, x + u), mix(p, w)
            return x / self.weight
        kept, passed_on = np.diag(np.diag(p)), p - np.diag(np.diag(p))
        self.in_flight.append((mix(passed_on, x), mix(passed_on, w)))
        late_x, late_w = self.in_flight.pop(0)
        self.weight = mix(kept, w) + late_w
        return (mix(kept, x) + late_x + u) / self.weight

    def without_exchange(self, params: np.ndarray, u: np.ndarray) -> np.ndarray:
        return params + u / self.weight

    def settle(self, params: np.ndarray) -> np.ndarray:
        """Return the mean over nodes and values in flight, and reset the weights to 1."""
        x = (self.weight * params).sum(0) + sum(x.sum(0) for x, _ in self.in_flight)
        w = self.weight.sum(0) + sum(w.sum(0) for _, w in self.in_flight)
        self.weight = np.ones_like(self.weight)
        self.in_flight = [(0 * x, 0 * w) for x, w in self.in_flight]
        return np.broadcast_to(x / w, params.shape)


def mean(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.mean(0, keepdims=True), x.shape)


def train(
    params: np.ndarray,
    grads: np.ndarray,
    *,
    learning_rate: Callable[[int], float],
    inner_momentum: float = 0.0,
    average_every: int | None = None,
    gossip: Gossip | None = None,
    other: Any = None,
    outer: Outer | None = None,
    paused: Collection[int] = (),
) -> np.ndarray:
    """Train by SGD with momentum on every replica, with averages and outer steps.

    Args:
      params: initial parameters `[replicas, ...]`.
      grads: gradients `[steps, replicas, ...]`.
      learning_rate: function of the 0-based update count.
      inner_momentum: momentum of SGD, as in torch and optax.
      average_every: period of LocalSGD.
      gossip: gossip in every update, instead of LocalSGD.
      other: another algorithm, whose `start(x)` returns a function of an update's number and the
        parameters that returns those after its exchange.
      outer: slow momentum or DiLoCo.
      paused: updates (from 1) in which nothing is exchanged.

    Returns:
      Parameters after every update, `[steps, replicas, ...]`.
    """
    x = params.astype(np.float64)
    trace, anchor = np.zeros_like(x), x.copy()
    velocity, gamma_before = np.zeros_like(x), 1.0  # velocity = gamma * m
    nodes = None if gossip is None else gossip.start(x)
    exchange = None if other is None else other.start(x)
    history = []
    for step, grad in enumerate(grads.astype(np.float64)):
        trace = inner_momentum * trace + grad
        u = -learning_rate(step) * trace
        talk = step + 1 not in paused
        slow = talk and outer is not None and (step + 1) % outer.every == 0
        base_exchanges = talk and not (slow and outer.exact)
        if nodes is None:
            x = x + u
            if base_exchanges and exchange is not None:
                x = exchange(step + 1, x)
            if base_exchanges and average_every and (step + 1) % average_every == 0:
                x = mean(x)
        else:
            x = nodes.exchange(x, u) if base_exchanges else nodes.without_exchange(x, u)
        if slow:
            gamma = outer.gamma(step)
            if outer.exact:
                x = mean(x) if nodes is None else nodes.settle(x)
            displacement = anchor - x
            rescale = 1.0 if gamma_before == 0 else gamma / gamma_before
            velocity = outer.momentum * rescale * velocity + displacement
            gamma_before = gamma
            ahead = outer.momentum * velocity + displacement if outer.nesterov else velocity
            anchor = anchor - outer.rate * ahead
            x = anchor.copy()
        history.append(x.copy())
    return np.stack(history)
