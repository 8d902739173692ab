"""Lookups and row-wise updates of whole tables, entry by entry, in NumPy alone.

Nothing here knows of devices: a table is an array (num_rows, dim), and the batch is whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Bag(NamedTuple):
    """What one feature looks up.

    Attributes:
      ids: (batch,) or (batch, length); below 0 there is none.
      weights: of the shape of `ids`, or None.
      positions: (length,), or None.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    positions: np.ndarray | None = None

    def factor(self, *place: int) -> float:
        """By what the vector at this place is multiplied."""
        weight = 1.0 if self.weights is None else float(self.weights[place])
        return weight * self.position(*place)

    def position(self, row: int, column: int = 0) -> float:
        """By what the place in the bag is weighed."""
        return 1.0 if self.positions is None else float(self.positions[column])


class Gradients(NamedTuple):
    """Gradients of `sum(embedded * slope)`, and the rows that were looked up."""

    table: np.ndarray
    positions: np.ndarray | None
    rows: set[int]


def embedded(table: np.ndarray, bag: Bag, pooling: str | None) -> np.ndarray:
    """(batch, dim), or a vector for each id without pooling; NaN for ids above the table."""
    vectors = np.zeros((*bag.ids.shape, table.shape[1]))
    for place in np.ndindex(bag.ids.shape):
        number = int(bag.ids[place])
        if number >= len(table):
            vectors[place] = np.nan
        elif number >= 0:
            vectors[place] = bag.factor(*place) * table[number]
    if pooling is None or bag.ids.ndim == 1:
        return vectors
    return vectors.sum(axis=1) / counts(bag, pooling)[:, None]


def counts(bag: Bag, pooling: str | None) -> np.ndarray:
    """By what the sum of each bag is divided."""
    if pooling != "mean" or bag.ids.ndim == 1:
        return np.ones(len(bag.ids))
    return np.maximum((bag.ids >= 0).sum(axis=1), 1)


def gradients(table: np.ndarray, bag: Bag, pooling: str | None, slope: np.ndarray) -> Gradients:
    """The gradients where the loss is the sum of all that was embedded, times `slope`."""
    of_table, rows = np.zeros_like(table), set()
    of_positions = None if bag.positions is None else np.zeros(len(bag.positions))
    divisors = counts(bag, pooling)
    for place in np.ndindex(bag.ids.shape):
        number = int(bag.ids[place])
        if number < 0:
            continue
        pooled = pooling is not None or bag.ids.ndim == 1
        of_vector = (slope[place[0]] if pooled else slope[place]) / divisors[place[0]]
        column = place[1] if len(place) > 1 else 0
        vector = np.nan if number >= len(table) else table[number]
        if of_positions is not None:
            weight = 1.0 if bag.weights is None else float(bag.weights[place])
            of_positions[column] += np.sum(of_vector * weight * vector)
        if number < len(table):
            of_table[number] += bag.factor(*place) * of_vector
            rows.add(number)
    return Gradients(of_table, of_positions, rows)


class Rule(NamedTuple):
    """A row-wise optimizer: of kind "adagrad" (`eps`, `initial`), "sgd" or "adam"."""

    kind: str
    rate: Callable[[int], float]
    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    b1: float = 0.9
    b2: float = 0.999
    per_row: bool = False


def kept_at_first(rule: Rule, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """What the optimizer of a table keeps for each row or element."""
    if rule.kind == "adagrad":
        return {"": np.full(shape[0], rule.initial)}
    if rule.kind == "adam":
        return {"mean": np.zeros(shape), "square": np.zeros(shape[:1] if rule.per_row else shape)}
    return {"": np.zeros(shape)} if rule.momentum else {}


def updated(
    table: np.ndarray, kept: dict[str, np.ndarray], grads: list[Gradients], rule: Rule, count: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The table and what is kept for its rows after an update, the `count`-th from 0."""
    table, kept = table.copy(), {name: x.copy() for name, x in kept.items()}
    total, rate, n = sum(g.table for g in grads), rule.rate(count), count + 1
    for row in set().union(*(g.rows for g in grads)):
        g = total[row]
        if rule.kind == "adagrad":
            kept[""][row] += (g**2).mean()
            table[row] -= rate / (np.sqrt(kept[""][row]) + rule.eps) * g
        elif rule.kind == "adam":
            mean, square = kept["mean"], kept["square"]
            mean[row] = rule.b1 * mean[row] + (1 - rule.b1) * g
            new = (g**2).mean() if rule.per_row else g**2
            square[row] = rule.b2 * square[row] + (1 - rule.b2) * new
            root = np.sqrt(square[row] / (1 - rule.b2**n)) + rule.eps
            moved = mean[row] / (1 - rule.b1**n) / root
            table[row] = table[row] - rate * (moved + rule.weight_decay * table[row])
        else:
            g = g + rule.weight_decay * table[row]
            if rule.momentum:
                kept[""][row] = rule.momentum * kept[""][row] + g
                g = g + rule.momentum * kept[""][row] if rule.nesterov else kept[""][row]
            table[row] -= rate * g
    return table, kept


def host(x: Any) -> np.ndarray:
    """Any array in double precision."""
    return np.asarray(x).astype(np.float64)
