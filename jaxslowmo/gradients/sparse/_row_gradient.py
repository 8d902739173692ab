"""Gradients of tables as row numbers and values: their sums, and how losses give them.

In the order of this file: row gradients; distinct rows and their sums; lookups, with respect to
whose rows, not the whole table, a loss is differentiated. Nothing here communicates.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.checks import check_names, checked_int, checks_flags
from ..._support.scopes import ALL_REDUCE_ROWS
from ..._support.types import PyTree
from ...collectives import scale
from ...tree import at_least_float32, leaf_names, type_text

OUT_OF_RANGE = 2**31 - 1  # beyond any capacity: scatters drop entries at this place


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
                "RowGradient: only gradients of one table can be added, got "
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
            f"{owner}: {name} must have integer rows (k,) and floating values (k, ...), got "
            f"{rows.dtype} {rows.shape} and {values.dtype} {values.shape}: has a transform been "
            "applied to it?"
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
            f"apply_rows: `table` must have the shape {gradient.shape} of `gradient`, got "
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


# Distinct rows and their sums.


class Coalesced(NamedTuple):
    """The result of `js.sparse.coalesce` and `js.sparse.row_gradient`.

    Attributes:
      gradient: sorted distinct rows, padding at the end. If `overflow` is not 0 it does not hold
        all rows, and all its values are NaN so that nobody takes it for the whole gradient.
      distinct: () int32, number of distinct rows.
      overflow: () int32, number of distinct rows that exceed the capacity; 0 if all rows fit.
    """

    gradient: RowGradient
    distinct: jax.Array
    overflow: jax.Array


def distinct_rows(
    rows: jax.Array, num_rows: int, num_places: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the distinct row numbers of an array of any shape; all that sums rows uses it.

    Args:
      rows: int32, padding is `num_rows`.
      num_rows: number of rows of the table.
      num_places: number of distinct rows that the result has room for; the last ones are left out.

    Returns:
      (num_places,) int32, the distinct rows, sorted; padding is `num_rows`. In the shape of `rows`
      int32, each entry's place among all distinct rows, `OUT_OF_RANGE` for padding. () int32, the
      number of all distinct rows.
    """
    flat = rows.reshape(-1)
    order = jnp.argsort(flat)
    ordered = flat[order]
    first = jnp.concatenate([jnp.ones(min(flat.size, 1), bool), ordered[1:] != ordered[:-1]])
    real = ordered < num_rows
    ranks = jnp.cumsum(first, dtype=jnp.int32) - 1
    ordered_places = jnp.where(real, ranks, jnp.int32(OUT_OF_RANGE))
    distinct = jnp.full(num_places, num_rows, jnp.int32)
    distinct = distinct.at[ordered_places].set(ordered, mode="drop")
    places = jnp.zeros(flat.shape, jnp.int32).at[order].set(ordered_places)
    count = jnp.sum(first & real, dtype=jnp.int32)
    return distinct, places.reshape(rows.shape), count


def _nan_on_overflow(
    rows: jax.Array, values: jax.Array, num_rows: int, distinct: jax.Array
) -> Coalesced:
    overflow = jnp.maximum(distinct - rows.shape[0], 0)
    values = jnp.where(overflow > 0, jnp.full_like(values, jnp.nan), values)
    return Coalesced(RowGradient(rows, values, num_rows), distinct, overflow)


def coalesce(gradient: RowGradient, *, capacity: int | None = None) -> Coalesced:
    """Sum the entries of a row gradient that have the same row, so that each row occurs once.

    Args:
      gradient: entries in any order. Rows outside of the table are left out, as padding is.
      capacity: entries of the result; None is the largest possible number of distinct rows.

    Returns:
      A `Coalesced`: the gradient with `capacity` entries, the number of distinct rows, and how many
      of them exceed the capacity; if any do, the values are NaN. Half precision is summed in
      float32.

    Raises:
      ValueError: capacity < 1; rows that are no integers or not one for each value.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = RowGradient(jnp.array([3, 1, 3]), jnp.ones((3, 1)), num_rows=5)
      >>> result = coalesce(gradient, capacity=3)
      >>> rows, values = result.gradient.rows, result.gradient.values[:, 0]
      >>> rows.tolist(), values.tolist(), int(result.distinct)
      ([1, 3, 5], [1.0, 2.0, 0.0], 2)

    Communication: none.
    """
    capacity = checked_capacity("coalesce", capacity)
    check_row_gradient("coalesce", "`gradient`", gradient)
    rows, num_rows = pad_invalid(gradient.rows, gradient.num_rows), gradient.num_rows
    size = capacity or max(1, min(rows.shape[0], num_rows))
    distinct, places, count = distinct_rows(rows, num_rows, size)
    zeros = jnp.zeros((size, *gradient.shape[1:]), at_least_float32(gradient.dtype))
    sums = add_entries(zeros, places, gradient.values).astype(gradient.dtype)
    return _nan_on_overflow(distinct, sums, num_rows, count)


def row_gradient(dense: jax.Array, *, capacity: int | None) -> Coalesced:
    """Return the rows of a dense gradient that are not zero.

    Args:
      dense: (num_rows, *s), gradient of a table.
      capacity: entries of the result; None is one for each row.

    Returns:
      A `Coalesced`; see `js.sparse.coalesce`.

    Raises:
      ValueError: capacity < 1, a scalar, or a gradient that is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> result = row_gradient(jnp.array([[0.0], [2.0], [0.0]]), capacity=2)
      >>> result.gradient.rows.tolist(), result.gradient.values[:, 0].tolist()
      ([1, 3], [2.0, 0.0])

    Communication: none.
    """
    capacity = checked_capacity("row_gradient", capacity)
    dense = jnp.asarray(dense)
    if dense.ndim < 1 or not jnp.issubdtype(dense.dtype, jnp.floating):
        got = type_text(dense)
        raise ValueError(f"row_gradient: `dense` must be floating (num_rows, ...), got {got}.")
    num_rows = dense.shape[0]
    used = jnp.any(dense != 0, axis=tuple(range(1, dense.ndim)))
    (rows,) = jnp.nonzero(used, size=capacity or max(1, num_rows), fill_value=num_rows)
    rows = rows.astype(jnp.int32)
    values = dense.at[rows].get(mode="fill", fill_value=0)
    return _nan_on_overflow(rows, values, num_rows, jnp.sum(used, dtype=jnp.int32))


def add_in_order(
    places: jax.Array, values: jax.Array, num_places: int, shares: jax.Array | None = None
) -> jax.Array:
    """Return sums of the devices' values `(num_places, *s)`, added one device at a time.

    The sums are at least float32. No place occurs twice in one addition, so the order of sums is
    fixed, even on backends whose scatter-add has no fixed order.

    Args:
      places: (devices, k) int32, distinct in each device; places >= `num_places` are dropped.
      values: (devices, k, *s).
      num_places: entries of the result.
      shares: (devices,), factors of each device's values; None: 1.
    """
    wide = at_least_float32(values.dtype)

    def add(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        place, device_values, *share = one
        device_values = device_values.astype(wide)
        if share:
            device_values = scale(device_values, *share)
        return add_entries(total, place, device_values), None

    entries = (places, values) if shares is None else (places, values, shares)
    zeros = jnp.zeros_like(values, wide, shape=(num_places, *values.shape[2:]))
    return lax.scan(add, zeros, entries)[0]


# Lookups.


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
            "TouchedRows holds only the rows that a step looks up: index it, `table[indices]`, or "
            "leave the table out of `tables` in js.row_value_and_grad."
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
