"""Optimizers of rows: they touch the rows that have a gradient, and no others."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LearningRate = float | Callable[[jax.Array], Any]


class RowwiseState(NamedTuple):
    """State of the optimizer of `js.embeddings`.

    Attributes:
      count: () int32, updates so far; what a schedule of the learning rate is asked with.
      accumulators: by stored array, (rows,) float32; none for `js.rowwise_sgd`.
    """

    count: jax.Array
    accumulators: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class RowwiseOptimizer:
    """How rows move; made by `js.rowwise_adagrad` and `js.rowwise_sgd`.

    Attributes:
      learning_rate: a number, or a schedule of the number of updates before this one.
      step: `step(rows, gradients, accumulators, mean_squares, rate)` returns new rows and
        accumulators: (k, dim) float32 twice, (k,) float32 twice or None, () float32.
      initial: what accumulators begin with; None: there are none, and no mean squares.
    """

    learning_rate: LearningRate
    step: Callable[..., tuple[jax.Array, jax.Array | None]]
    initial: float | None = None

    def rate(self, count: jax.Array) -> jax.Array:
        """The learning rate of the update after so many."""
        rate = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)


def rowwise_adagrad(
    learning_rate: LearningRate, *, eps: float = 1e-8, initial: float = 0.0
) -> RowwiseOptimizer:
    """Adagrad with one accumulator per row, for the tables of `js.embeddings`.

    In float32, for each row that was looked up, with the gradient g of its D entries, and in this
    order::

        a = a + sum(g * g) / D
        row = row - (rate / (sqrt(a) + eps)) * g

    Args:
      learning_rate: a number >= 0, or a schedule, as optax's, of the number of updates before.
      eps: added to the root; > 0.
      initial: what accumulators begin with; >= 0.

    Returns:
      An optimizer for `js.embeddings`. Its state is a float32 per row.

    Raises:
      ValueError: a learning rate, `eps` or `initial` out of range.

    Communication: none, but for tables with `shard="column"`, whose rows lie on all devices in
      parts: one all-reduce of a float32 per distinct row over their axis, for all such tables.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; Duchi et al., JMLR 2011, with a mean of squares per row.
    """
    owner = "rowwise_adagrad"
    _check_rate(owner, learning_rate)
    _check(owner, "eps", eps, lambda x: x > 0, "a number > 0")
    _check(owner, "initial", initial, lambda x: x >= 0, "a number >= 0")

    def step(
        rows: jax.Array,
        gradients: jax.Array,
        accumulators: jax.Array,
        mean_squares: jax.Array,
        rate: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        accumulators = accumulators + mean_squares
        factors = rate / (jnp.sqrt(accumulators) + jnp.float32(eps))
        return rows - factors[:, None] * gradients, accumulators

    return RowwiseOptimizer(learning_rate, step, float(initial))


def rowwise_sgd(learning_rate: LearningRate, *, weight_decay: float = 0.0) -> RowwiseOptimizer:
    """Plain SGD on the rows that were looked up, for the tables of `js.embeddings`.

    `row = row - rate * (g + weight_decay * row)`, in float32. The decay is lazy: a row decays in
    the updates in which it was looked up, and in no others.

    Args:
      learning_rate: a number >= 0, or a schedule, as optax's, of the number of updates before.
      weight_decay: >= 0.

    Returns:
      An optimizer for `js.embeddings`, whose state is the number of updates alone.

    Raises:
      ValueError: a learning rate or decay out of range.

    Communication: none.
    """
    owner = "rowwise_sgd"
    _check_rate(owner, learning_rate)
    _check(owner, "weight_decay", weight_decay, lambda x: x >= 0, "a number >= 0")

    def step(
        rows: jax.Array, gradients: jax.Array, accumulators: None, mean_squares: None, rate: Any
    ) -> tuple[jax.Array, None]:
        if weight_decay:
            gradients = gradients + jnp.float32(weight_decay) * rows
        return rows - rate * gradients, None

    return RowwiseOptimizer(learning_rate, step)


def _check_rate(owner: str, rate: Any) -> None:
    if not callable(rate):
        wanted = "a number >= 0 or a schedule"
        _check(owner, "learning_rate", rate, lambda x: x >= 0, wanted)


def _check(
    owner: str, argument: str, value: Any, is_right: Callable[[float], bool], rule: str
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not is_right(value):
        raise ValueError(f"{owner}: `{argument}` must be {rule}, got {value!r}.")
