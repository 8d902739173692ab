"""Optimizers of table rows: what they keep for each row or element, and how they change rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._support.checks import as_number, checks_flags
from .._support.types import PyTree
from ..gradients.sparse import RowGradient
from ..transform import prevent_fusion

LearningRate = float | Callable[[jax.Array], Any]


class RowUpdate(NamedTuple):
    """The inputs of one update of table rows.

    Attributes:
      rows: (k, dim) float32.
      gradients: (k, dim) float32.
      kept: entries of the optimizer's state for these rows, like `RowwiseOptimizer.kept`.
      mean_squares: (k,) float32, of gradients over a whole row; None if nothing is kept per row.
      rate: () float32, the learning rate.
      count: () int32, number of updates before this one.
    """

    rows: jax.Array
    gradients: jax.Array
    kept: Any
    mean_squares: jax.Array | None
    rate: jax.Array
    count: jax.Array


Rule = Callable[..., tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Kept:
    """A float32 array that an optimizer keeps for a stored array.

    Attributes:
      initial: value of all its entries at the start.
      per_row: whether it has one entry per row, in place of one per element.
    """

    initial: float = 0.0
    per_row: bool = False


class AdamMoments(NamedTuple):
    """The moments that `js.rowwise_adam` keeps for a stored array.

    Attributes:
      mean: (rows, dim) float32, moving mean of gradients.
      square: (rows, dim) float32, moving mean of their squares; (rows,) with `per_row`.
    """

    mean: Any
    square: Any


class RowwiseState(NamedTuple):
    """The state of the optimizers of `js.embeddings`.

    Attributes:
      count: () int32, number of updates so far, the argument of a learning rate schedule.
      accumulators: maps a stored array to what its optimizer keeps for it: (rows,) float32 for
        `rowwise_adagrad`, (rows, dim) float32 for `rowwise_sgd` with momentum, `AdamMoments`
        for `js.rowwise_adam`. Stored arrays for which nothing is kept are left out.
    """

    count: jax.Array
    accumulators: dict[str, PyTree]


@dataclass(frozen=True)
class RowwiseOptimizer:
    """An optimizer of table rows, such as `js.rowwise_adagrad` makes it.

    Two of them are equal if the same function made them from equal arguments.

    Attributes:
      learning_rate: a number, or a schedule: a function of the number of updates before this one.
      rule: function `rule(update, *options)` of a `RowUpdate` that returns new rows and `kept`.
      kept: a `Kept`, or a NamedTuple of several; None: nothing is kept.
      options: further arguments of `rule`.
    """

    learning_rate: LearningRate
    rule: Rule
    kept: Any = None
    options: tuple[float, ...] = ()

    @property
    def uses_mean_squares(self) -> bool:
        """Whether something is kept per row."""
        return any(kept.per_row for kept in jax.tree.leaves(self.kept))

    def update_rows(
        self,
        arrays: tuple[jax.Array, PyTree],
        gradient: RowGradient,
        mean_squares: jax.Array | None,
        count: jax.Array,
    ) -> tuple[jax.Array, PyTree]:
        """Return a stored array and what is kept for it, both with the rows of `gradient` updated.

        Args:
          arrays: the stored array, and what is kept for it.
          gradient: distinct rows and their gradients; padding is not written.
          mean_squares: (k,) float32, see `RowUpdate`.
          count: () int32, number of updates before this one.

        Communication: none.
        """
        rows, rate = gradient.rows, self.learning_rate

        def read_rows(whole: jax.Array) -> jax.Array:
            return whole.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)

        def write_rows(whole: jax.Array, new: jax.Array) -> jax.Array:
            return whole.at[rows].set(new.astype(whole.dtype), mode="drop")

        old, kept = jax.tree.map(read_rows, arrays)
        rate = jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)
        values = gradient.values.astype(jnp.float32)
        update = RowUpdate(old, values, kept, mean_squares, rate, count)
        # Isolated, so that programs with and without lookups ahead give the same bits.
        new = prevent_fusion(lambda update: self.rule(update, *self.options), rows, update)
        return jax.tree.map(write_rows, arrays, new)


def rowwise_adagrad(
    learning_rate: LearningRate, *, eps: float = 1e-8, initial: float = 0.0
) -> RowwiseOptimizer:
    """Return Adagrad with one accumulator per row, for the tables of `js.embeddings`.

    For each row that was looked up, with the gradient g of its D entries, it computes in float32
    and in this order::

        a = a + sum(g * g) / D
        row = row - (rate / (sqrt(a) + eps)) * g

    Args:
      learning_rate: a number >= 0, or a schedule as in optax, a function of the number of updates
        before this one.
      eps: number that is added to the root; > 0.
      initial: initial value of accumulators; >= 0.

    Returns:
      An optimizer for `js.embeddings` or a `js.Table`. Its state is one float32 per row.

    Raises:
      ValueError: a learning rate, `eps` or `initial` out of range.

    Communication: for tables with `shard="column"`, whose rows are split over the devices, one
      all-reduce of a float32 per distinct row over their axis, for all such tables; none for
      others.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; Duchi et al., JMLR 2011, with a mean of squares per row.
    """
    number = partial(_checked_number, "rowwise_adagrad")
    kept = Kept(number("initial", initial, ">= 0"), per_row=True)
    return RowwiseOptimizer(
        _rate(number, learning_rate), _adagrad, kept, (number("eps", eps, "> 0"),)
    )


def _adagrad(update: RowUpdate, eps: float) -> tuple[jax.Array, jax.Array]:
    sums = update.kept + update.mean_squares
    factors = update.rate / (jnp.sqrt(sums) + jnp.float32(eps))
    return update.rows - factors[:, None] * update.gradients, sums


@checks_flags("rowwise_sgd")
def rowwise_sgd(
    learning_rate: LearningRate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> RowwiseOptimizer:
    """Return SGD on the rows that were looked up, for the tables of `js.embeddings`.

    For each row that was looked up, with the gradient g, it computes in float32 what `torch.optim`
    does for a parameter::

        g = g + weight_decay * row
        m = momentum * m + g
        row = row - rate * m  # with nesterov: rate * (g + momentum * m)

    All of it is lazy: the row decays, and its momentum fades, only in the updates in which it was
    looked up.

    Args:
      learning_rate: a number >= 0, or a schedule as in optax, a function of the number of updates
        before this one.
      momentum: factor of the momentum; 0 <= momentum < 1. The default is 0.
      nesterov: whether to move by the momentum of the next update, as Nesterov does.
      weight_decay: factor of the decay; >= 0. The default is 0.

    Returns:
      An optimizer for `js.embeddings` or a `js.Table`. Its state is a float32 per element with
      momentum, none without.

    Raises:
      ValueError: a learning rate, momentum or decay out of range; `nesterov` without momentum.

    Communication: none.

    Source: FBGEMM's EXACT_SGD, which has no momentum; `torch.optim.SGD` for the rest.
    """
    number = partial(_checked_number, "rowwise_sgd")
    momentum = number("momentum", momentum, ">= 0 and < 1")
    if nesterov and not momentum:
        raise ValueError("rowwise_sgd: `nesterov` needs `momentum` > 0, got 0.")
    options = momentum, nesterov, number("weight_decay", weight_decay, ">= 0")
    kept = Kept() if momentum else None
    return RowwiseOptimizer(_rate(number, learning_rate), _sgd, kept, options)


def _sgd(
    update: RowUpdate, momentum: float, nesterov: bool, decay: float
) -> tuple[jax.Array, jax.Array | None]:
    gradients, trace = update.gradients, update.kept
    if decay:
        gradients = gradients + jnp.float32(decay) * update.rows
    if trace is not None:
        trace = momentum * trace + gradients
        gradients = gradients + momentum * trace if nesterov else trace
    return update.rows - update.rate * gradients, trace


@checks_flags("rowwise_adam")
def rowwise_adam(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    per_row: bool = False,
) -> RowwiseOptimizer:
    """Return Adam on the rows that were looked up, for the tables of `js.embeddings`.

    For each row that was looked up, with the gradient g, it computes in float32, where n is the
    number of updates with this one::

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g  # with per_row: the mean of g * g over the row
        row = row - rate * (m / (1 - b1**n) / (sqrt(v / (1 - b2**n)) + eps) + weight_decay * row)

    The moments of a row fade, and the row decays, only in the updates in which it was looked up; n
    counts all updates.

    Args:
      learning_rate: a number >= 0, or a schedule as in optax, a function of the number of updates
        before this one.
      b1: factor of the mean of gradients; 0 <= b1 < 1.
      b2: factor of the mean of squares; 0 <= b2 < 1.
      eps: number that is added to the root; > 0.
      weight_decay: factor of the decay, which the moments do not see (AdamW); >= 0.
      per_row: whether the second moment is one number per row, not one per element.

    Returns:
      An optimizer for `js.embeddings` or a `js.Table`. Its state is `AdamMoments`: two float32 per
      element, or with `per_row` one per element and one per row.

    Raises:
      ValueError: a number out of range.

    Communication: with `per_row` that of `js.rowwise_adagrad`; else none.

    Source: FBGEMM's ADAM, and with `per_row` PARTIAL_ROWWISE_ADAM; Kingma and Ba, ICLR 2015.
    """
    number = partial(_checked_number, "rowwise_adam")
    options = number("b1", b1, ">= 0 and < 1"), number("b2", b2, ">= 0 and < 1")
    options += number("eps", eps, "> 0"), number("weight_decay", weight_decay, ">= 0")
    kept = AdamMoments(Kept(), Kept(per_row=per_row))
    return RowwiseOptimizer(_rate(number, learning_rate), _adam, kept, options)


def _adam(
    update: RowUpdate, b1: float, b2: float, eps: float, decay: float
) -> tuple[jax.Array, AdamMoments]:
    squares, number = update.mean_squares, (update.count + 1).astype(jnp.float32)
    if squares is None:
        squares = jnp.square(update.gradients)
    mean = b1 * update.kept.mean + (1 - b1) * update.gradients
    square = b2 * update.kept.square + (1 - b2) * squares
    root = jnp.sqrt(square / (1 - b2**number)) + eps
    step = mean / (1 - b1**number) / (root if root.ndim == 2 else root[:, None])
    return update.rows - update.rate * (step + decay * update.rows), AdamMoments(mean, square)


_RANGES: dict[str, Callable[[float], bool]] = {
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    ">= 0 or a schedule": lambda x: x >= 0,
    ">= 0 and < 1": lambda x: 0 <= x < 1,
}


def _checked_number(owner: str, argument: str, value: Any, range_: str) -> float:
    """Return a number as a float; raise `ValueError` unless it is in a range of `_RANGES`."""
    number = as_number(value)
    if number is None or not _RANGES[range_](number):
        raise ValueError(f"{owner}: `{argument}` must be a number {range_}, got {value!r}.")
    return number


def _rate(number: Callable[..., float], rate: LearningRate) -> LearningRate:
    """Return a checked rate; optimizers with equal numbers are equal, whatever types these have."""
    return rate if callable(rate) else number("learning_rate", rate, ">= 0 or a schedule")
