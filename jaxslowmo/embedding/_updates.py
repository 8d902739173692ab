"""Updates of only the rows that have a gradient, and the state of their optimizers."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..gradients.sparse import RowGradient
from ..mesh import sum_over
from ..transform import isolated
from ._optimizers import RowUpdate
from ._stores import TableLayout

Stored = dict[str, jax.Array]


class RowwiseState(NamedTuple):
    """The state of the optimizers of `js.embeddings`.

    Attributes:
      count: () int32, number of updates so far, the argument of a learning rate schedule.
      accumulators: maps a stored array to what its optimizer keeps for it: (rows,) float32 for
        `js.rowwise_adagrad`, (rows, dim) float32 for `js.rowwise_sgd` with momentum, `AdamMoments`
        for `js.rowwise_adam`. Stored arrays for which nothing is kept are left out.
    """

    count: jax.Array
    accumulators: dict[str, PyTree]


def apply_row_gradients(
    layout: TableLayout,
    tables: Stored,
    state: RowwiseState,
    gradients: Mapping[str, RowGradient],
    active: jax.Array | None,
) -> tuple[Stored, RowwiseState]:
    """Return tables and state after one update; see `Embeddings.apply`."""
    optimizers = {name: layout.stores[name].optimizer for name in gradients}
    squares = _mean_squares(
        layout, {n: g for n, g in gradients.items() if optimizers[n].uses_mean_squares}
    )
    new_tables, accumulators = dict(tables), dict(state.accumulators)
    for name, gradient in gradients.items():
        table, rows, optimizer = tables[name], gradient.rows, optimizers[name]
        if active is not None:
            # All rows become padding, so that the table is not written.
            rows = jnp.where(active, rows, jnp.int32(gradient.num_rows))
        kept = accumulators.get(name)
        # Isolated, so that programs with and without lookups ahead give the same bits.
        update = RowUpdate(
            _rows_of(table, rows).astype(jnp.float32),
            gradient.values.astype(jnp.float32),
            jax.tree.map(lambda whole, rows=rows: _rows_of(whole, rows), kept),
            squares.get(name),
            optimizer.rate(state.count),
            state.count,
        )
        new, new_kept = isolated(optimizer.step, rows, update)
        new_tables[name] = _with_rows(table, rows, new)
        if kept is not None:
            accumulators[name] = jax.tree.map(
                lambda whole, new, rows=rows: _with_rows(whole, rows, new), kept, new_kept
            )
    count = state.count + (1 if active is None else jnp.asarray(active).astype(jnp.int32))
    return new_tables, RowwiseState(count, accumulators)


def _rows_of(whole: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows of `whole`; 0 for padding."""
    return whole.at[rows].get(mode="fill", fill_value=0)


def _with_rows(whole: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return `whole` with new rows, rounded to its dtype; drop padding."""
    return whole.at[rows].set(values.astype(whole.dtype), mode="drop")


def _mean_squares(layout: TableLayout, gradients: Mapping[str, RowGradient]) -> Stored:
    """Return the mean square of each row's gradient over all columns: (k,) float32 by array.

    Communication: for arrays whose columns are split, one all-reduce of all their sums.
    """

    def sum_of_squares(rows: jax.Array, values: jax.Array) -> jax.Array:
        # Two isolated steps: a fused multiply-add would change the last bit.
        squares = isolated(jnp.square, rows, values.astype(jnp.float32))
        return isolated(lambda x: jnp.sum(x, axis=1), rows, squares)

    sums = {name: sum_of_squares(g.rows, g.values) for name, g in gradients.items()}
    split = {name: x for name, x in sums.items() if layout.is_split(name)}
    if split and layout.axis_name is not None:
        flat = sum_over(jnp.concatenate(list(split.values())), layout.axis_name)
        parts = lax.split(flat, [x.size for x in split.values()])
        sums |= dict(zip(split, parts, strict=True))
    return {name: total / layout.stores[name].dim for name, total in sums.items()}
