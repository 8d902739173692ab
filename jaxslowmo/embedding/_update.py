"""The update of the rows that have a gradient, and of no others."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ..gradients.sparse import RowGradient
from ..mesh import axis_size, vary_over, varying_axes
from ..transform import isolated
from ._layout import Layout
from ._optimizers import RowwiseOptimizer, RowwiseState

Stored = dict[str, jax.Array]


def first_state(optimizer: RowwiseOptimizer, tables: Mapping[str, jax.Array]) -> RowwiseState:
    """The optimizer's state before any update, for stored tables or a device's part of them."""
    accumulators = {}
    if optimizer.initial is not None:
        accumulators = {
            name: jnp.full(table.shape[:1], optimizer.initial, jnp.float32)
            for name, table in tables.items()
        }
    return RowwiseState(jnp.zeros([], jnp.int32), accumulators)


def apply_row_gradients(
    optimizer: RowwiseOptimizer,
    layout: Layout,
    tables: Stored,
    state: RowwiseState,
    gradients: Mapping[str, RowGradient],
    active: jax.Array | None,
) -> tuple[Stored, RowwiseState]:
    """Tables and state after one update; see `Embeddings.apply`."""
    rate = optimizer.rate(state.count)
    squares = {}
    if optimizer.initial is not None:
        squares = _mean_squares(layout, gradients)
    moved, accumulators = dict(tables), dict(state.accumulators)
    for name, gradient in gradients.items():
        table, rows = tables[name], gradient.rows
        if active is not None:
            # No row at all, so that nothing of the table is written.
            rows = jnp.where(active, rows, jnp.int32(gradient.num_rows))
        of_rows = accumulators.get(name)
        old = None if of_rows is None else of_rows.at[rows].get(mode="fill", fill_value=0)
        # Programs that look up ahead give the same bits as those that do not.
        new, sums = isolated(
            optimizer.step,
            rows,
            table.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32),
            gradient.values.astype(jnp.float32),
            old,
            squares.get(name),
            rate,
        )
        moved[name] = _set_rows(table, rows, new)
        if of_rows is not None and sums is not None:
            accumulators[name] = _set_rows(of_rows, rows, sums)
    count = state.count + (1 if active is None else jnp.asarray(active).astype(jnp.int32))
    return moved, RowwiseState(count, accumulators)


def _set_rows(whole: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """`whole` with new rows, rounded to its type; padding is dropped."""
    values = values.astype(whole.dtype)
    axes = frozenset().union(*map(varying_axes, (whole, rows, values)))
    return vary_over(whole, axes).at[rows].set(values, mode="drop")


def _sum_of_squares(rows: jax.Array, values: jax.Array) -> jax.Array:
    # Two steps: where one instruction multiplies and adds, the last bit is another.
    squares = isolated(jnp.square, rows, values.astype(jnp.float32))
    return isolated(lambda x: jnp.sum(x, axis=1), rows, squares)


def _mean_squares(layout: Layout, gradients: Mapping[str, RowGradient]) -> Stored:
    """The mean square of each row's gradient, over all of its columns; (k,) float32 by array.

    Communication: for arrays whose columns are split, one all-reduce of all their sums.
    """
    axis = layout.axis_name
    sums = {name: _sum_of_squares(own.rows, own.values) for name, own in gradients.items()}
    split = {name: x for name, x in sums.items() if layout.is_split(name)}
    if split and axis is not None:
        flat = jnp.concatenate(list(split.values()))
        if axis_size(axis) > 1 or axis in varying_axes(flat):
            flat = lax.psum(flat, axis)
        parts = lax.split(flat, [x.size for x in split.values()])
        sums |= dict(zip(split, parts, strict=True))
    return {name: total / layout.stores[name].dim for name, total in sums.items()}
