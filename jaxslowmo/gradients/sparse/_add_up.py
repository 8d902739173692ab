"""Rows of several devices added up device by device: sums of fixed order, the same bits for all."""

import jax
import jax.numpy as jnp
from jax import lax

from ...collectives import scaled
from ...mesh import vary_over, varying_axes
from ...tree import at_least_float32
from ._coalesce import NOWHERE, distinct_rows
from ._row_gradient import RowGradient, add_entries


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
