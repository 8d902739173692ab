"""Gradients of tables as row numbers and values, alone and next to those of dense parameters."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.checks import check_names, checked_int
from ..._support.scopes import ALL_REDUCE_ROWS
from ..._support.types import PyTree
from ...tree import at_least_float32, leaf_names


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """Some rows of a table `(num_rows, *s)`: their numbers and values."""

    rows: jax.Array
    values: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table."""
        return (self.num_rows, *self.values.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGradient(SomeRows):
    """The gradient of a table `(num_rows, *s)` that is zero in all but some rows.

    The gradient is the sum of its entries: a row may occur several times, in any order. Entries
    with `rows == num_rows` are padding and add nothing, nor does any other row outside of the
    table (`js.sparse.all_reduce_rows` reports the number of these).

    Element-wise transforms, optax's optimizers among them, would treat the row numbers as gradients
    too. They come after `js.sparse.all_reduce_rows`, which returns ordinary arrays, or after
    `to_dense`.

    Attributes:
      rows: (k,) row numbers, of any integer type; int32 from functions of jaxslowmo.
      values: (k, *s), the gradient in each of these rows.
      num_rows: number of rows of the table; static.
    """

    def to_dense(self) -> jax.Array:
        """Return the gradient as an array `(num_rows, *s)`; half precision is summed in float32."""
        check_row_gradient("RowGradient.to_dense", "the gradient", self)
        zeros = jnp.zeros(self.shape, at_least_float32(self.dtype))
        rows = pad_invalid(self.rows, self.num_rows)
        return add_entries(zeros, rows, self.values).astype(self.dtype)

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """Return the sum of two gradients of one table: the concatenation of their entries."""
        if not isinstance(other, RowGradient):
            return NotImplemented
        if self.shape != other.shape or self.dtype != other.dtype:
            raise ValueError(
                "RowGradient: only gradients of one table can be added, got tables "
                f"{self.dtype}{list(self.shape)} and {other.dtype}{list(other.shape)}."
            )
        return RowGradient(
            jnp.concatenate([row_numbers(self.rows), row_numbers(other.rows)]),
            jnp.concatenate([self.values, other.values]),
            self.num_rows,
        )


def no_rows(like: RowGradient, num_entries: int, dtype: Any = None) -> RowGradient:
    """Return a gradient of a table like that of `like`, with entries of padding alone."""
    values = jnp.zeros((num_entries, *like.shape[1:]), like.dtype if dtype is None else dtype)
    return RowGradient(jnp.full(num_entries, like.num_rows, jnp.int32), values, like.num_rows)


def is_row_gradient(x: Any) -> bool:
    """Return whether `x` is a `RowGradient`; as `is_leaf` it stops tree functions there."""
    return isinstance(x, RowGradient)


def arrays_of(tree: PyTree) -> PyTree:
    """Return `tree` with each gradient of rows replaced by its array of values."""
    return jax.tree.map(
        lambda x: x.values if is_row_gradient(x) else x, tree, is_leaf=is_row_gradient
    )


def check_row_gradient(owner: str, name: str, gradient: RowGradient) -> None:
    """Raise `ValueError` unless rows are integers, one for each value, and values floating."""
    rows, values = jnp.asarray(gradient.rows), jnp.asarray(gradient.values)
    are_rows = jnp.issubdtype(rows.dtype, jnp.integer) and rows.ndim == 1
    are_values = jnp.issubdtype(values.dtype, jnp.floating) and values.shape[:1] == rows.shape
    if not (are_rows and are_values):
        raise ValueError(
            f"{owner}: {name} needs rows that are integers of shape (k,) and values that are "
            f"floating of shape (k, ...), got {rows.dtype} {rows.shape} and {values.dtype} "
            f"{values.shape}. (Has an element-wise transform, such as clipping or scaling, been "
            "applied to the RowGradient?)"
        )


def checked_capacity(owner: str, capacity: Any, argument: str = "capacity") -> int | None:
    """Return `capacity`, None or a plain int; raise `ValueError` unless it is an int >= 1."""
    if capacity is None:
        return None
    return checked_int(f"{owner}: `{argument}` counts rows, and if not None it", capacity, 1)


def checked_capacities(owner: str, capacity: Any) -> Callable[[str], int | None]:
    """Return the capacity of each table by name, from one for all tables or one per name.

    Raises:
      ValueError: a capacity that is neither None nor an int >= 1.
    """
    if isinstance(capacity, Mapping):
        numbers = {n: checked_capacity(owner, x, f"capacity[{n!r}]") for n, x in capacity.items()}
        return numbers.get
    number = checked_capacity(owner, capacity)
    return lambda name: number


def row_numbers(rows: Any) -> jax.Array:
    """Return row numbers of any integer type as int32, before anything is computed with them.

    The size of a table may not fit their own type: as uint8, 256 would be 0. A number that int32
    does not hold becomes the lowest int32, which is outside of every table, also from the end.
    """
    rows, limits = jnp.asarray(rows), jnp.iinfo(jnp.int32)
    narrow = rows.astype(jnp.int32)
    if jnp.iinfo(rows.dtype).max <= limits.max:  # no number of a narrow type is too large
        return narrow
    fits = (narrow.astype(rows.dtype) == rows) & ((narrow < 0) == (rows < 0))
    return jnp.where(fits, narrow, jnp.full_like(narrow, limits.min))


def pad_invalid(rows: jax.Array, num_rows: int) -> jax.Array:
    """Return `rows` as int32, with padding for all rows outside of the table.

    Negative numbers count from the end in jax, so without this they would change other rows.
    """
    rows = row_numbers(rows)
    within = (rows >= 0) & (rows < num_rows)
    return jnp.where(within, rows, jnp.full_like(rows, num_rows))


def num_outside(gradient: RowGradient) -> jax.Array:
    """Return the number of entries outside of the table, () int32; padding does not count."""
    rows = row_numbers(gradient.rows)
    return jnp.sum((rows < 0) | (rows > gradient.num_rows), dtype=jnp.int32)


def add_entries(table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return `table` with `values` added to its `rows`; padding is dropped."""
    return table.at[rows].add(values.astype(table.dtype), mode="drop")


def apply_rows(table: jax.Array, gradient: RowGradient, *, learning_rate: Any) -> jax.Array:
    """Take a step of plain SGD on the rows of a table that have a gradient, and on no others.

    Args:
      table: (num_rows, *s).
      gradient: gradient of this table, such as `js.sparse.all_reduce_rows(..., output="rows")`
        returns. Rows outside of the table are left out.
      learning_rate: float or () array.

    Returns:
      `table - learning_rate * gradient`, in the table's dtype.

    Raises:
      ValueError: the gradient is of a table of another shape, or no valid `RowGradient`.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = RowGradient(jnp.array([2]), jnp.ones((1, 2)), num_rows=3)
      >>> apply_rows(jnp.zeros((3, 2)), gradient, learning_rate=0.5).tolist()
      [[0.0, 0.0], [0.0, 0.0], [-0.5, -0.5]]

    Communication: none.
    """
    check_row_gradient("apply_rows", "`gradient`", gradient)
    table = jnp.asarray(table)
    if table.shape != gradient.shape:
        raise ValueError(
            f"apply_rows: `gradient` is of a table of shape {gradient.shape}, `table` has "
            f"{table.shape}."
        )
    wide = at_least_float32(gradient.dtype)
    step = gradient.values.astype(wide) * -jnp.asarray(learning_rate, wide)
    return add_entries(table, pad_invalid(gradient.rows, gradient.num_rows), step)


Rows = Mapping[str, RowGradient]
"""The gradients of rows, by name of the table."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithRows:
    """The gradients of a model whose tables are no leaves of its parameters.

    Attributes:
      dense: a tree like the dense parameters.
      rows: gradients of the tables, by name.
      inner_axes: axes inside a replica over which `rows` need no mean: they are means already, or
        devices hold different rows.
      table_axes: the axes in `inner_axes` over which the tables are sharded.
    """

    dense: PyTree
    rows: Rows
    inner_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    table_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def split_rows(
    grads: PyTree, tables: Sequence[str] = ()
) -> tuple[PyTree, Rows, tuple[str, ...], Callable[..., PyTree]]:
    """Split gradients into dense ones and those of rows, wherever these are in the tree.

    Args:
      grads: gradients or a tree like them.
      tables: names of further leaves that are tables, whatever their type.

    Returns:
      The dense gradients; those of rows and of `tables`, by name; axes over which rows need no
      mean; and a function `join(dense=..., rows=...)` that undoes the split.

    Raises:
      ValueError: a name in `tables` that no leaf has.
    """
    if isinstance(grads, WithRows):
        return grads.dense, grads.rows, grads.inner_axes, partial(dataclasses.replace, grads)
    names = leaf_names(arrays_of(grads))
    check_names(f"{ALL_REDUCE_ROWS}: `tables`", tables, names, "leaves")
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_row_gradient)
    leaves = dict(zip(names, leaves, strict=True))
    rows = {name: x for name, x in leaves.items() if name in tables or is_row_gradient(x)}
    dense = treedef.unflatten([None if name in rows else x for name, x in leaves.items()])

    def join(dense: PyTree, rows: Rows) -> PyTree:
        others = zip(names, treedef.flatten_up_to(dense), strict=True)
        return treedef.unflatten([rows.get(name, x) for name, x in others])

    return dense, rows, (), join
