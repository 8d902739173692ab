"""Several arrays as one array of bytes, so that they travel in one collective."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size
from ._local import gather_slices

_LANES = 128
_FEWEST_ROWS = 8  # one tile of bytes on a TPU

Kind = tuple[int, Any]
"""Number of elements and dtype."""


def pack(*parts: jax.Array) -> jax.Array:
    """Rows of several arrays as rows of bytes.

    Args:
      parts: `(r, m)` each, of any dtypes of whole bytes.

    Returns:
      `(r, rows, lanes)` uint8. Many bytes are padded to whole rows of 128: a TPU holds `(r, 1, m)`
      in tiles of 4 rows and would send four times as much.
    """
    joined = jnp.concatenate([_bytes(part) for part in parts], axis=1)
    rows, lanes = _layout(joined.shape[1])
    padded = jnp.pad(joined, ((0, 0), (0, rows * lanes - joined.shape[1])))
    return padded.reshape(joined.shape[0], rows, lanes)


def unpack(packed: jax.Array, *kinds: Kind) -> list[jax.Array]:
    """The inverse of `pack`: `(r, m)` arrays of the given sizes and dtypes."""
    flat = packed.reshape(packed.shape[0], math.prod(packed.shape[1:]))
    parts, start = [], 0
    for size, dtype in kinds:
        stop = start + size * jnp.dtype(dtype).itemsize
        parts.append(_from_bytes(flat[:, start:stop], size, dtype))
        start = stop
    return parts


def exchange(packed: jax.Array, axis_name: AxisName) -> jax.Array:
    """Entry i of the result is what replica i holds as entry r, on replica r.

    Args:
      packed: `(replicas, rows, lanes)`.
      axis_name: mapped axis, or several.

    Communication: one all-to-all of `packed` over `axis_name`. (Under `vmap`, where nothing is
      sent, one over each of several axes.)
    """
    names = axis_names(axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if len(names) == 1 or all(name in manual for name in names):
        return lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    whole = packed.reshape(*map(axis_size, names), *packed.shape[1:])
    for dimension, name in enumerate(names):
        whole = lax.all_to_all(whole, name, dimension, dimension, tiled=True)
    return whole.reshape(packed.shape)


def gather(packed: jax.Array, axis_name: AxisName) -> jax.Array:
    """What all replicas hold, `(replicas, rows, lanes)` of `(1, rows, lanes)` each.

    Typed as equal over `axis_name`.

    Communication: one all-gather of the result over `axis_name` (of parts of it over each of
      several axes).
    """
    return gather_slices(packed, axis_name, like=jnp.zeros([]))


def _layout(num_bytes: int) -> tuple[int, int]:
    if num_bytes < _FEWEST_ROWS * _LANES:
        return 1, num_bytes
    return math.ceil(num_bytes / _LANES), _LANES


def _unsigned(itemsize: int) -> Any:
    return jnp.dtype(f"uint{8 * itemsize}")


def _bytes(x: jax.Array) -> jax.Array:
    """All lowest bytes, then the next: a minor dimension of 4 would fill whole lanes on a TPU."""
    itemsize = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, _unsigned(itemsize))
    return jnp.concatenate([(bits >> 8 * i).astype(jnp.uint8) for i in range(itemsize)], axis=1)


def _from_bytes(data: jax.Array, size: int, dtype: Any) -> jax.Array:
    itemsize = jnp.dtype(dtype).itemsize
    planes = [
        data[:, i * size : (i + 1) * size].astype(_unsigned(itemsize)) << 8 * i
        for i in range(itemsize)
    ]
    bits = planes[0]
    for plane in planes[1:]:
        bits = bits | plane
    return lax.bitcast_convert_type(bits, dtype)
