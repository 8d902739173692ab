"""Row-wise optimizers, and updates of only the rows that have a gradient."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..gradients.sparse import RowGradient
from ..mesh import sum_over
from ..transform import isolated
from ._stores import TableLayout

Stored = dict[str, jax.Array]
LearningRate = float | Callable[[jax.Array], Any]


class RowwiseState(NamedTuple):
    """The state of the optimizer of `js.embeddings`.

    Attributes:
      count: () int32, number of updates so far, the argument of a learning rate schedule.
      accumulators: maps a stored array to (rows,) float32; empty for `js.rowwise_sgd`.
    """

    count: jax.Array
    accumulators: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class RowwiseOptimizer:
    """An optimizer of table rows, made by `js.rowwise_adagrad` or `js.rowwise_sgd`.

    Attributes:
      learning_rate: a number, or a schedule: a function of the number of updates before this one.
      step: function `step(rows, gradients, accumulators, mean_squares, rate)` that returns new rows
        and accumulators. Rows and gradients are (k, dim) float32, accumulators and mean squares are
        (k,) float32 or None, the rate is () float32.
      initial: initial value of accumulators; None: no accumulators and no mean squares.
    """

    learning_rate: LearningRate
    step: Callable[..., tuple[jax.Array, jax.Array | None]]
    initial: float | None = None

    def rate(self, count: jax.Array) -> jax.Array:
        """Return the learning rate, () float32, after `count` updates."""
        rate = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)


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
      An optimizer for `js.embeddings`. Its state is one float32 per row.

    Raises:
      ValueError: a learning rate, `eps` or `initial` out of range.

    Communication: for tables with `shard="column"`, whose rows are split over the devices, one
      all-reduce of a float32 per distinct row over their axis, for all such tables; none for
      others.

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
    """Return plain SGD on the rows that were looked up, for the tables of `js.embeddings`.

    It computes `row = row - rate * (g + weight_decay * row)` in float32. The decay is lazy: a row
    decays only in the updates in which it was looked up.

    Args:
      learning_rate: a number >= 0, or a schedule as in optax, a function of the number of updates
        before this one.
      weight_decay: factor of the decay; >= 0. The default is 0.

    Returns:
      An optimizer for `js.embeddings`, whose state is only the number of updates.

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
        rule = "a number >= 0 or a schedule"
        _check(owner, "learning_rate", rate, lambda x: x >= 0, rule)


def _check(
    owner: str, argument: str, value: Any, is_right: Callable[[float], bool], rule: str
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not is_right(value):
        raise ValueError(f"{owner}: `{argument}` must be {rule}, got {value!r}.")


def first_state(optimizer: RowwiseOptimizer, tables: Mapping[str, jax.Array]) -> RowwiseState:
    """Return the initial optimizer state for stored tables, whole or a device's part."""
    accumulators = {}
    if optimizer.initial is not None:
        accumulators = {
            name: jnp.full(table.shape[:1], optimizer.initial, jnp.float32)
            for name, table in tables.items()
        }
    return RowwiseState(jnp.zeros([], jnp.int32), accumulators)


def apply_row_gradients(
    optimizer: RowwiseOptimizer,
    layout: TableLayout,
    tables: Stored,
    state: RowwiseState,
    gradients: Mapping[str, RowGradient],
    active: jax.Array | None,
) -> tuple[Stored, RowwiseState]:
    """Return tables and state after one update; see `Embeddings.apply`."""
    rate = optimizer.rate(state.count)
    squares = {}
    if optimizer.initial is not None:
        squares = _mean_squares(layout, gradients)
    new_tables, accumulators = dict(tables), dict(state.accumulators)
    for name, gradient in gradients.items():
        table, rows = tables[name], gradient.rows
        if active is not None:
            # All rows become padding, so that the table is not written.
            rows = jnp.where(active, rows, jnp.int32(gradient.num_rows))
        accumulator = accumulators.get(name)
        old = None if accumulator is None else accumulator.at[rows].get(mode="fill", fill_value=0)
        # Isolated, so that programs with and without lookups ahead give the same bits.
        new, sums = isolated(
            optimizer.step,
            rows,
            table.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32),
            gradient.values.astype(jnp.float32),
            old,
            squares.get(name),
            rate,
        )
        new_tables[name] = _set_rows(table, rows, new)
        if accumulator is not None and sums is not None:
            accumulators[name] = _set_rows(accumulator, rows, sums)
    count = state.count + (1 if active is None else jnp.asarray(active).astype(jnp.int32))
    return new_tables, RowwiseState(count, accumulators)


def _set_rows(whole: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return `whole` with new rows, rounded to its dtype; drop padding."""
    return whole.at[rows].set(values.astype(whole.dtype), mode="drop")


def _sum_of_squares(rows: jax.Array, values: jax.Array) -> jax.Array:
    # Two isolated steps: a fused multiply-add would change the last bit.
    squares = isolated(jnp.square, rows, values.astype(jnp.float32))
    return isolated(lambda x: jnp.sum(x, axis=1), rows, squares)


def _mean_squares(layout: TableLayout, gradients: Mapping[str, RowGradient]) -> Stored:
    """Return the mean square of each row's gradient over all columns: (k,) float32 by array.

    Communication: for arrays whose columns are split, one all-reduce of all their sums.
    """
    axis = layout.axis_name
    sums = {
        name: _sum_of_squares(gradient.rows, gradient.values)
        for name, gradient in gradients.items()
    }
    split = {name: x for name, x in sums.items() if layout.is_split(name)}
    if split and axis is not None:
        flat = sum_over(jnp.concatenate(list(split.values())), axis)
        parts = lax.split(flat, [x.size for x in split.values()])
        sums |= dict(zip(split, parts, strict=True))
    return {name: total / layout.stores[name].dim for name, total in sums.items()}
