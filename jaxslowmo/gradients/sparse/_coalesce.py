"""Each row once: duplicates summed, rows sorted, in a static number of entries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...collectives import scaled
from ...mesh import vary_over, varying_axes
from ...tree import at_least_float32
from ._row_gradient import RowGradient, add_entries, check_row_gradient, checked_capacity, inside

NOWHERE = 2**31 - 1  # beyond the capacity of anything: what lies there is dropped


class Coalesced(NamedTuple):
    """What `js.coalesce` and `js.row_gradient` return.

    Attributes:
      gradient: rows sorted and distinct, padding at the end. Where `overflow` is not 0 there are
        rows that it cannot hold, and all its values are NaN, so that it cannot pass for the whole.
      distinct: () int32, number of distinct rows.
      overflow: () int32, by how many rows these exceed the capacity; 0 where all is well.
    """

    gradient: RowGradient
    distinct: jax.Array
    overflow: jax.Array


def distinct_rows(rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that sorts `rows`, and in that order each entry's place among distinct rows.

    Args:
      rows: (k,) int32, padding is `num_rows`.
      num_rows: rows of the table.

    Returns:
      `(order, places, distinct)`: both (k,), and () int32. The place of padding is `NOWHERE`.
    """
    size = rows.shape[0]
    order = jnp.argsort(rows)
    ordered = rows[order]
    first = jnp.concatenate([jnp.ones(min(size, 1), bool), ordered[1:] != ordered[:-1]])
    real = ordered < num_rows
    places = jnp.where(real, jnp.cumsum(first, dtype=jnp.int32) - 1, jnp.int32(NOWHERE))
    return order, places, jnp.sum(first & real, dtype=jnp.int32)


def compact(
    rows: jax.Array, values: jax.Array, num_rows: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorted distinct rows, the sums of their values, and how many rows there are.

    Rows beyond `capacity` are left out: the caller compares it with the returned number.
    """
    order, places, distinct = distinct_rows(rows, num_rows)
    wide = values[order].astype(at_least_float32(values.dtype))
    sums = jnp.zeros((capacity, *values.shape[1:]), wide.dtype).at[places].add(wide, mode="drop")
    kept = jnp.full(capacity, num_rows, jnp.int32).at[places].set(rows[order], mode="drop")
    return kept, sums.astype(values.dtype), distinct


def nonzero_rows(dense: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `compact`, of the rows of `dense` that are not all zero."""
    num_rows = dense.shape[0]
    used = jnp.any(dense != 0, axis=tuple(range(1, dense.ndim)))
    (rows,) = jnp.nonzero(used, size=capacity, fill_value=num_rows)
    rows = rows.astype(jnp.int32)
    values = dense.at[rows].get(mode="fill", fill_value=0)
    return rows, values, jnp.sum(used, dtype=jnp.int32)


def _whole_or_nan(
    found: tuple[jax.Array, jax.Array, jax.Array], num_rows: int, capacity: int
) -> Coalesced:
    rows, values, distinct = found
    overflow = jnp.maximum(distinct - capacity, 0)
    values = jnp.where(overflow > 0, jnp.full_like(values, jnp.nan), values)
    return Coalesced(RowGradient(rows, values, num_rows), distinct, overflow)


def coalesce(gradient: RowGradient, *, capacity: int | None = None) -> Coalesced:
    """Sum the values of equal rows.

    Args:
      gradient: entries in any order. Rows outside of the table are left out, as padding is.
      capacity: entries of the result; None is as many as there can be distinct rows.

    Returns:
      A `Coalesced`: the gradient with `capacity` entries, the number of distinct rows, and by how
      many they exceed the capacity; in that case the values are NaN. Half precision is summed in
      float32.

    Raises:
      ValueError: capacity < 1; rows that are no integers or not one for each value.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = RowGradient(jnp.array([3, 1, 3]), jnp.ones((3, 1)), num_rows=5)
      >>> found = coalesce(gradient, capacity=3)
      >>> found.gradient.rows.tolist(), found.gradient.values[:, 0].tolist(), int(found.distinct)
      ([1, 3, 5], [1.0, 2.0, 0.0], 2)

    Communication: none.
    """
    capacity = checked_capacity("coalesce", capacity)
    check_row_gradient("coalesce", "`gradient`", gradient)
    rows, num_rows = inside(gradient.rows, gradient.num_rows), gradient.num_rows
    capacity = max(1, min(rows.shape[0], num_rows)) if capacity is None else capacity
    return _whole_or_nan(compact(rows, gradient.values, num_rows, capacity), num_rows, capacity)


def row_gradient(dense: jax.Array, *, capacity: int | None) -> Coalesced:
    """The rows of a dense gradient that are not zero.

    Args:
      dense: (num_rows, *s), gradient of a table.
      capacity: entries of the result; None is one for each row.

    Returns:
      A `Coalesced`; see `js.coalesce`.

    Raises:
      ValueError: capacity < 1, a scalar, or a gradient that is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> found = row_gradient(jnp.array([[0.0], [2.0], [0.0]]), capacity=2)
      >>> found.gradient.rows.tolist(), found.gradient.values[:, 0].tolist()
      ([1, 3], [2.0, 0.0])

    Communication: none.
    """
    size = checked_capacity("row_gradient", capacity)
    dense = jnp.asarray(dense)
    if dense.ndim < 1 or not jnp.issubdtype(dense.dtype, jnp.floating):
        raise ValueError(
            "row_gradient: `dense` must be the floating gradient of a table (num_rows, ...), got "
            f"{dense.dtype}{list(dense.shape)}."
        )
    num_rows = dense.shape[0]
    size = max(1, num_rows) if size is None else size
    return _whole_or_nan(nonzero_rows(dense, size), num_rows, size)


def distinct_places(rows: jax.Array, num_rows: int, num_places: int) -> tuple[jax.Array, jax.Array]:
    """The distinct rows of all devices, and where among them each entry's row is.

    Args:
      rows: (devices, k) int32; padding is `num_rows`.
      num_rows: rows of the table.
      num_places: entries of the result; as many as there can be distinct rows.

    Returns:
      `(num_places,)` int32, sorted, padded with `num_rows`; and `(devices, k)` int32, `NOWHERE` for
      padding.
    """
    flat = rows.reshape(-1)
    order, ordered_places, _ = distinct_rows(flat, num_rows)
    distinct = jnp.full(num_places, num_rows, jnp.int32)
    distinct = distinct.at[ordered_places].set(flat[order], mode="drop")
    places = jnp.full(flat.shape, NOWHERE, jnp.int32).at[order].set(ordered_places)
    return distinct, places.reshape(rows.shape)


def add_in_order(
    places: jax.Array, values: jax.Array, num_places: int, shares: jax.Array | None = None
) -> jax.Array:
    """`(num_places, *s)`, in at least float32: sums of the devices' values, one device at a time.

    No place occurs twice in one addition, so the order of sums is fixed, also where scattered
    additions run in any order.

    Args:
      places: (devices, k) int32, distinct in each device; what lies beyond `num_places` is dropped.
      values: (devices, k, *s).
      num_places: entries of the result.
      shares: (devices,), what each device's values are multiplied with; None: not at all.
    """
    wide = at_least_float32(values.dtype)

    def add(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        place, own, *share = one
        own = own.astype(wide)
        return add_entries(total, place, scaled(own, share[0]) if share else own), None

    entries = (places, values) if shares is None else (places, values, shares)
    # As varying as what is added: a scan keeps the type of what it carries.
    axes = frozenset().union(*map(varying_axes, entries))
    zeros = jnp.zeros((num_places, *values.shape[2:]), wide)
    return lax.scan(add, vary_over(zeros, axes), entries)[0]


def add_up_rows(rows: jax.Array, values: jax.Array, num_rows: int) -> RowGradient:
    """The sum over devices of their rows, each row once, in at least float32.

    Args:
      rows: (devices, k) int32, distinct in each device; padding is `num_rows`.
      values: (devices, k, *s).
      num_rows: rows of the table.

    Communication: none.
    """
    num_places = min(rows.size, num_rows)
    distinct, places = distinct_places(rows, num_rows, num_places)
    return RowGradient(distinct, add_in_order(places, values, num_places), num_rows)
