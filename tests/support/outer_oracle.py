"""Outer steps in NumPy and float64: fragments in turn, delay and merge, over a base or none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from support.oracle import Gossip


@dataclass
class Spread:
    """How the slow steps of a run are spread; `fragments` are places among the parameters.

    `weight` are the replicas' shares in all averages; one of 0 does not move by its own updates.
    """

    every: int
    fragments: Sequence[slice | np.ndarray]
    delay: int = 0
    merge: float = 0.0
    weight: np.ndarray | None = None
    momentum: float = 0.0
    rate: float = 1.0
    nesterov: bool = False
    local_every: int = 0  # the base is an average in every so many updates
    gossip: Gossip | None = None  # the base is gossip
    inner_rate: Callable[[int], float] = lambda count: 1.0  # which never grows

    @property
    def is_alone(self) -> bool:
        return len(self.fragments) == 1 and not self.delay and not self.merge


def run(spread: Spread, start: np.ndarray, updates: np.ndarray) -> list[np.ndarray]:
    """Return the parameters `(replicas, n)` after each update.

    Args:
      spread: the algorithm.
      start: the first parameters, `(n,)`.
      updates: the optimizer's updates, `(updates, replicas, n)`.
    """
    replicas = updates.shape[1]
    params = np.broadcast_to(start, (replicas, *start.shape)).astype(np.float64)
    anchor, velocity = start.astype(np.float64).copy(), np.zeros(start.shape)
    nodes = None if spread.gossip is None else spread.gossip.start(params)
    taken: dict[int, tuple[np.ndarray, float]] = {}
    history = []
    count = len(spread.fragments)
    before = [spread.inner_rate(0)] * count  # the rate of each fragment's last slow step
    weight = np.ones(replicas) if spread.weight is None else spread.weight.astype(np.float64)
    for t, u in enumerate(updates, start=1):
        u = np.where(weight[:, None] > 0, u, 0)
        offsets = [(number + 1) * spread.every // count for number in range(count)]
        slow = [(t - offset) % spread.every == 0 for offset in offsets]
        skips_base = spread.is_alone and slow[0]
        if nodes is None:
            params = params + u
            if spread.local_every and t % spread.local_every == 0 and not skips_base:
                params = np.broadcast_to(weight @ params / weight.sum(), params.shape)
        elif skips_base:
            params = nodes.without_exchange(params, u)
        else:
            params = nodes.exchange(params, u)
        for number, part in enumerate(spread.fragments):
            if (t + spread.delay - offsets[number]) % spread.every == 0:
                taken[number] = _mean_of_all(params, nodes, weight)[part], spread.inner_rate(t - 1)
            if not slow[number] or number not in taken:
                continue
            average, rate = taken.pop(number)
            displacement = anchor[part] - average
            # v = rate * m, with m <- momentum m + D / rate
            kept = spread.momentum * rate / before[number]
            velocity[part], before[number] = kept * velocity[part] + displacement, rate
            step = velocity[part]
            if spread.nesterov:
                step = spread.momentum * step + displacement
            anchor[part] = anchor[part] - spread.rate * step
            params = params.copy()
            params[:, part] = anchor[part] + spread.merge * (params[:, part] - anchor[part])
            if nodes is not None:
                if spread.is_alone:
                    nodes.settle(params)
                else:
                    _move_late(nodes, part, anchor[part], spread.merge)
        history.append(params)
    return history


def _mean_of_all(params, nodes, weight):
    """The weighted mean over replicas and values in flight to them."""
    if nodes is None:
        return weight @ params / weight.sum()
    x = weight @ (nodes.weight * params) + sum(weight @ x for x, _ in nodes.in_flight)
    w = weight @ nodes.weight + sum(weight @ w for _, w in nodes.in_flight)
    return x / w


def _move_late(nodes, part, anchor, merge):
    for x, w in nodes.in_flight:
        x[:, part] = w * anchor + merge * (x[:, part] - w * anchor)
