"""Arrays of any dtypes as rows of bytes, which all platforms send as they are."""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_LANES = 128
_FEWEST_ROWS = 8  # one tile of bytes on a TPU

Kind = tuple[int, Any]
"""The number of elements of an array, and its dtype."""


def pack(*parts: jax.Array) -> jax.Array:
    """Pack the rows of several arrays into rows of bytes.

    Args:
      parts: arrays `(r, m)`, of any dtypes of whole bytes.

    Returns:
      `(r, rows, lanes)` uint8. From 1 KiB on bytes are padded to whole rows of 128: a TPU stores
      `(r, 1, m)` in tiles of 4 rows and would send four times as much.
    """
    joined = jnp.concatenate([_bytes(part) for part in parts], axis=1)
    num_bytes = joined.shape[1]
    lanes = num_bytes if num_bytes < _FEWEST_ROWS * _LANES else _LANES
    padded = jnp.pad(joined, ((0, 0), (0, -num_bytes % lanes)))
    return padded.reshape(joined.shape[0], -1, lanes)


def unpack(packed: jax.Array, *kinds: Kind) -> list[jax.Array]:
    """Return the arrays `(r, m)` of the given sizes and dtypes; the inverse of `pack`.

    Of a NumPy array they are NumPy arrays.
    """
    flat = packed.reshape(packed.shape[0], math.prod(packed.shape[1:]))
    parts, start = [], 0
    for size, dtype in kinds:
        stop = start + size * jnp.dtype(dtype).itemsize
        parts.append(_from_bytes(flat[:, start:stop], size, dtype))
        start = stop
    return parts


def _unsigned_dtype(itemsize: int) -> Any:
    return jnp.dtype(f"uint{8 * itemsize}")


def _bytes(x: jax.Array) -> jax.Array:
    """Return all lowest bytes, then the next; bytes as a last dimension fill whole TPU lanes."""
    itemsize = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, _unsigned_dtype(itemsize))
    return jnp.concatenate([(bits >> 8 * i).astype(jnp.uint8) for i in range(itemsize)], axis=1)


def _from_bytes(data: jax.Array, size: int, dtype: Any) -> jax.Array:
    itemsize = jnp.dtype(dtype).itemsize
    planes = [
        data[:, i * size : (i + 1) * size].astype(_unsigned_dtype(itemsize)) << 8 * i
        for i in range(itemsize)
    ]
    return functools.reduce(operator.or_, planes).view(dtype)
