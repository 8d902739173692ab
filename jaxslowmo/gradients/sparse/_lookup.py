"""Differentiation with respect to the rows that are looked up, not the whole table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._support.checks import check_names, checks_flags
from ..._support.types import PyTree
from ...tree import leaf_names
from ._coalesce import distinct_rows
from ._row_gradient import (
    RowGradient,
    SomeRows,
    checked_capacities,
    checked_capacity,
    pad_invalid,
    row_numbers,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TouchedRows(SomeRows):
    """The rows of a table that a batch uses, indexed like the whole table: `touched[indices]`.

    It replaces the table in a loss function. A row that it does not hold, or that is outside of
    the table, is NaN; negative numbers count from the end, as in jax.

    Attributes:
      rows: (k,) int32, sorted and distinct; padding is `num_rows`.
      values: (k, *s), the rows; differentiate with respect to them.
      num_rows: number of rows of the table; static.
    """

    def positions(self, indices: Any) -> jax.Array:
        """Return the position in `values` of each row of `indices`; k for a missing row."""
        rows, held_rows = _resolve_indices(indices, self.num_rows), row_numbers(self.rows)
        size = held_rows.shape[0]
        place = jnp.searchsorted(held_rows, rows).astype(jnp.int32)
        is_held = held_rows.at[place].get(mode="fill", fill_value=self.num_rows) == rows
        return jnp.where(is_held & (rows < self.num_rows), place, jnp.int32(size))

    def __getitem__(self, indices: Any) -> jax.Array:
        """Return rows of the table, `(*indices.shape, *s)`."""
        return self.values.at[self.positions(indices)].get(mode="fill", fill_value=jnp.nan)

    def gradient(self, values: jax.Array) -> RowGradient:
        """Return the gradient of the table from that of `self.values`."""
        return RowGradient(self.rows, values, self.num_rows)

    def __jax_array__(self) -> jax.Array:
        """Raise `TypeError`: this is not the whole table."""
        raise TypeError(
            "TouchedRows holds only the rows that a step looks up: index it, `table[indices]`. A "
            "table that is used in another way, as the output layer for example, has a gradient in "
            "every row: leave it out of `tables` in js.row_value_and_grad."
        )


class GatheredRows(NamedTuple):
    """The result of `js.sparse.gather_rows`.

    Attributes:
      touched: the distinct rows, a `TouchedRows`.
      positions: int32, in the shape of the indices: `touched.values[positions]` is
        `table[indices]`.
      overflow: () int32, number of distinct rows beyond `capacity`; looked up, they are NaN.
    """

    touched: TouchedRows
    positions: jax.Array
    overflow: jax.Array


def _resolve_indices(indices: Any, num_rows: int) -> jax.Array:
    """Return row numbers of `indices`, int32: negative ones resolved, invalid ones as padding."""
    rows = row_numbers(indices)
    return pad_invalid(jnp.where(rows < 0, rows + num_rows, rows), num_rows)


def gather_rows(
    table: jax.Array, indices: jax.Array, *, capacity: int | None = None
) -> GatheredRows:
    """Return the distinct rows of a table that `indices` look up.

    Differentiate with respect to `touched.values`, and `touched.gradient(...)` is the gradient of
    the table, which never exists as a whole.

    Args:
      table: (num_rows, *s).
      indices: integers of any type and shape; negative ones count from the end.
      capacity: largest number of rows to gather; None is the largest possible number.

    Returns:
      A `GatheredRows`. Looking up a row outside of the table, or one beyond `capacity`, gives NaN.

    Raises:
      ValueError: capacity < 1, indices that are no integers (from jax).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> table, indices = jnp.arange(8.0).reshape(4, 2), jnp.array([3, 1, 3])
      >>> touched, positions, _ = gather_rows(table, indices)
      >>> gradient = jax.grad(lambda v: v[positions].sum())(touched.values)
      >>> touched.gradient(gradient).rows.tolist(), gradient[:, 0].tolist()
      ([1, 3, 4], [1.0, 2.0, 0.0])

    Communication: none.
    """
    capacity = checked_capacity("gather_rows", capacity)
    table = jnp.asarray(table)
    num_rows = table.shape[0]
    flat = _resolve_indices(indices, num_rows).reshape(-1)
    size = capacity or max(1, min(flat.shape[0], num_rows))
    rows, places, count = distinct_rows(flat, num_rows, size)
    touched = TouchedRows(rows, table.at[rows].get(mode="fill", fill_value=0), num_rows)
    positions = jnp.minimum(places, size).reshape(jnp.shape(indices))
    return GatheredRows(touched, positions, jnp.maximum(count - size, 0))


@checks_flags("row_value_and_grad")
def row_value_and_grad(
    loss_fn: Callable[..., Any],
    tables: Callable[..., Mapping[str, Any]],
    *,
    capacity: int | Mapping[str, int | None] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """Return `jax.value_and_grad`, but with `RowGradient`s for embedding tables.

    A loss function that looks rows up by indexing, `params["embedding"][i]`, needs no change: it
    receives a `TouchedRows` in place of each table.

    Args:
      loss_fn: function `loss_fn(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
      tables: function `tables(*args, **kwargs)` that returns all indices that the loss looks up
        with these arguments, by name of the table's leaf: `lambda batch: {"embedding":
        batch["tokens"]}`. Rows that it leaves out are NaN in the loss.
      capacity: rows per table, an int or one per name; None is the number of indices. Rows beyond
        it are NaN in the loss, so it must suffice.
      has_aux: whether `loss_fn` returns `(loss, aux)`, see `jax.value_and_grad`.

    Returns:
      A function `(params, *args, **kwargs) -> (value, grads)`; `grads` is like `params`, with a
      `RowGradient` for each table; reduce them with `js.sparse.all_reduce_rows`.

    Raises:
      ValueError: capacity < 1; when called, names that are no leaves of `params`.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda params, tokens: jnp.sum(params["embedding"][tokens] ** 2)
      >>> value_and_grad = row_value_and_grad(loss, lambda tokens: {"embedding": tokens})
      >>> _, grads = value_and_grad({"embedding": jnp.ones((100, 1))}, jnp.array([7, 7]))
      >>> grads["embedding"].rows.tolist(), grads["embedding"].values.tolist()
      ([7, 100], [[4.0], [0.0]])

    Communication: none.
    """
    capacities = checked_capacities("row_value_and_grad", capacity)

    def value_and_grad(params: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        names, (leaves, treedef) = leaf_names(params), jax.tree.flatten(params)
        indices = tables(*args, **kwargs)
        check_names("row_value_and_grad: `tables`", indices, names, "leaves")
        touched: dict[int, TouchedRows] = {}
        for i, name in enumerate(names):
            if name in indices:
                gathered = gather_rows(leaves[i], indices[name], capacity=capacities(name))
                touched[i] = gathered.touched
        values = [touched[i].values if i in touched else leaf for i, leaf in enumerate(leaves)]

        def loss_of(values: list[Any]) -> Any:
            rows = {i: dataclasses.replace(t, values=values[i]) for i, t in touched.items()}
            inputs = [rows.get(i, x) for i, x in enumerate(values)]
            return loss_fn(treedef.unflatten(inputs), *args, **kwargs)

        value, grads = jax.value_and_grad(loss_of, has_aux=has_aux)(values)
        grads = [touched[i].gradient(g) if i in touched else g for i, g in enumerate(grads)]
        return value, treedef.unflatten(grads)

    return value_and_grad
