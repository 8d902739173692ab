"""Coalescing of rows: duplicates summed, rows sorted, in a static number of entries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...collectives import scale
from ...tree import at_least_float32
from ._row_gradient import (
    RowGradient,
    add_entries,
    check_row_gradient,
    checked_capacity,
    pad_invalid,
)

OUT_OF_RANGE = 2**31 - 1  # beyond any capacity: scatters drop entries at this place


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
        raise ValueError(
            "row_gradient: `dense` must be the floating gradient of a table (num_rows, ...), got "
            f"{dense.dtype}{list(dense.shape)}."
        )
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
