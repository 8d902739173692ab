"""Means of flat buffers that send fewer bytes: 8 bits per element, or the largest entries."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, is_of_devices
from ..tree import at_least_float32
from ._permute import of_all
from ._scatter import gather_slices

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
    """Return the arrays `(r, m)` of the given sizes and dtypes; the inverse of `pack`."""
    flat = packed.reshape(packed.shape[0], math.prod(packed.shape[1:]))
    parts, start = [], 0
    for size, dtype in kinds:
        stop = start + size * jnp.dtype(dtype).itemsize
        parts.append(_from_bytes(flat[:, start:stop], size, dtype))
        start = stop
    return parts


def exchange(packed: jax.Array, axis_name: AxisName) -> jax.Array:
    """Send entry i of `packed` to replica i, and return the entries from all replicas, in order.

    Args:
      packed: array `(replicas, rows, lanes)`.
      axis_name: mapped axis, or several.

    Communication: one all-to-all of `packed` over `axis_name`.
    """
    if is_of_devices(axis_name):
        return lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    # vmap exchanges over one axis at a time; its all-gather sends nothing.
    return of_all(packed, axis_name)[:, lax.axis_index(axis_name)]


def _unsigned(itemsize: int) -> Any:
    return jnp.dtype(f"uint{8 * itemsize}")


def _bytes(x: jax.Array) -> jax.Array:
    """Return all lowest bytes, then the next; bytes as a last dimension fill whole TPU lanes."""
    itemsize = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, _unsigned(itemsize))
    return jnp.concatenate([(bits >> 8 * i).astype(jnp.uint8) for i in range(itemsize)], axis=1)


def _from_bytes(data: jax.Array, size: int, dtype: Any) -> jax.Array:
    itemsize = jnp.dtype(dtype).itemsize
    planes = [
        data[:, i * size : (i + 1) * size].astype(_unsigned(itemsize)) << 8 * i
        for i in range(itemsize)
    ]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, planes), dtype)


_BLOCKS_TO_ALIGN = 32


@dataclass(frozen=True)
class BlockFormat:
    """A format of 8 bits per number: blocks of codes, each with its largest magnitude as scale.

    Attributes:
      dtype: dtype of the codes.
      largest: the code of the largest magnitude in a block.
      mantissa: number of mantissa bits of a floating-point code; None for integer codes.
      least_exponent: exponent below which floating-point codes are evenly spaced.
      block_size: elements that share a float32 scale; the last block of a row may be shorter.
    """

    dtype: Any
    largest: float
    mantissa: int | None = None
    least_exponent: int = 0
    block_size: int = 256

    def codes(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Return the codes of `x`.

        Args:
          x: float32 in [-largest, largest], of any shape.
          noise: uniform numbers in [0, 1) for stochastic rounding: a code is one of the two
            neighbours of x, and x on average. None rounds to nearest, and ties to even.
        """
        if self.mantissa is None:
            return _rounded(x, noise).astype(self.dtype)
        # The distance of codes around x is 2**(exponent - mantissa). Rounding in float32 makes the
        # cast exact on every platform.
        exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
        steps = jnp.maximum(exponent, self.least_exponent) - self.mantissa
        return (_rounded(x * _power(-steps), noise) * _power(steps)).astype(self.dtype)

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return rows of numbers as rows of bytes: the codes, followed by the scale of each block.

        Args:
          x: array `(r, m)`, float32.
          key: PRNG key for stochastic rounding; None rounds to nearest.

        Returns:
          `(r, rows, lanes)` uint8, the result of `pack`. The scale of a block is its largest
          magnitude: 0 for a block of zeros, NaN for a block with a value that is not finite.
        """
        rows, size = x.shape
        blocks = self.num_blocks(size)
        padded = jnp.pad(jnp.abs(x), ((0, 0), (0, blocks * self.block_size - size)))
        scales = jnp.max(padded.reshape(rows, blocks, self.block_size), axis=2)
        scales = jnp.where(jnp.isfinite(scales), scales, jnp.full_like(scales, jnp.nan))
        by = jnp.repeat(scales, self.block_size, axis=1)[:, :size]
        # `by > 0` is False for NaN too.
        ratio = jnp.where(by > 0, x / jnp.where(by > 0, by, 1.0), jnp.zeros_like(x))
        noise = None if key is None else jax.random.uniform(key, (rows, size), jnp.float32)
        return pack(
            self.codes(jnp.clip(ratio * self.largest, -self.largest, self.largest), noise), scales
        )

    def decode(self, packed: jax.Array, size: int) -> jax.Array:
        """Return the numbers, `(r, size)` float32; NaN in a block whose scale is NaN."""
        kinds = (size, self.dtype), (self.num_blocks(size), jnp.float32)
        codes, scales = unpack(packed, *kinds)
        by = jnp.repeat(scales, self.block_size, axis=1)[:, :size]
        # Some compilers turn a division by a constant into this product. Written as a product, the
        # result is the same with all of them.
        return codes.astype(jnp.float32) * (1 / self.largest) * by

    def num_blocks(self, size: int) -> int:
        """Return the number of blocks of a row of `size` elements."""
        return math.ceil(size / self.block_size)

    def chunk_size(self, size: int, replicas: int) -> int:
        """Return how many elements each replica sums: whole blocks if that needs little padding."""
        even = math.ceil(size / replicas)
        if even < _BLOCKS_TO_ALIGN * self.block_size:
            return even
        return self.num_blocks(even) * self.block_size


INT8 = BlockFormat(jnp.int8, 127.0)
E4M3 = BlockFormat(jnp.float8_e4m3fn, 448.0, mantissa=3, least_exponent=-6)
E5M2 = BlockFormat(jnp.float8_e5m2, 57344.0, mantissa=2, least_exponent=-14)


def _rounded(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (noise < x - below).astype(x.dtype)


def _power(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def quantised_mean(
    flat: jax.Array,
    axis_name: AxisName,
    how: BlockFormat,
    *,
    dtype: jnp.dtype,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of `flat` over replicas, sent in `how`, and this replica's error.

    Each replica sums one chunk. It does not send its own part of that chunk, which is exact;
    in that place `lost` holds the error of the rounded mean, times the number of replicas:

        sum over replicas of (flat - lost) / replicas = mean

    up to rounding in float32. A replica that adds `lost` to the next `flat` compensates for it.

    Args:
      flat: array `(n,)`, float32, n > 0.
      axis_name: mapped axis, or several, of R > 1 replicas.
      how: format of the numbers that are sent.
      dtype: dtype of the mean.
      key: PRNG key for stochastic rounding, equal on all replicas; None rounds to nearest.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`, NaN in a
      block in which a value of some replica is not finite; and `(n,)` float32 `lost`.

    Communication: one all-to-all and one all-gather over `axis_name`, each of n bytes and 4 per
      block (plus padding); with several axes, an all-gather over each.
    """
    replicas, size = axis_size(axis_name), flat.shape[0]
    me = lax.axis_index(axis_name)
    to_chunk, to_all = (
        (None, None) if key is None else jax.random.split(jax.random.fold_in(key, me))
    )
    per = how.chunk_size(size, replicas)
    chunks = jnp.pad(flat, (0, replicas * per - size)).reshape(replicas, per)

    sent = how.encode(chunks, to_chunk)
    mine = (jnp.arange(replicas, dtype=me.dtype) == me)[:, None]
    parts = jnp.where(mine, chunks, how.decode(exchange(sent, axis_name), per))
    mean = jnp.sum(parts, axis=0) / replicas
    gathered = gather_slices(how.encode(mean[None], to_all), axis_name)
    means = how.decode(gathered, per).astype(dtype)

    rounded = lax.dynamic_index_in_dim(means, me, keepdims=False).astype(jnp.float32)
    lost = jnp.where(mine, replicas * (mean - rounded), chunks - how.decode(sent, per))
    return means.reshape(-1)[:size], lost.reshape(-1)[:size]


def top_k_mean(
    flat: jax.Array, axis_name: AxisName, k: int, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the mean over replicas of each one's k largest entries, and the part not sent.

    Args:
      flat: array `(n,)`, at least float32.
      axis_name: mapped axis, or several, of R replicas.
      k: number of entries of largest magnitude that a replica sends, 1 to n; entries that are not
        finite come first.
      dtype: dtype of the mean and of the values that are sent.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`; and
      `(n,)` in the dtype of `flat`, the part of `flat` that was not sent.

    Communication: one all-gather over `axis_name` of R * k values and int32 positions (of parts of
      it over each of several axes).
    """
    magnitude = jnp.where(jnp.isnan(flat), jnp.full_like(flat, jnp.inf), jnp.abs(flat))
    positions = lax.top_k(magnitude, k)[1].astype(jnp.int32)
    values = flat[positions].astype(dtype)
    lost = flat.at[positions].add(-values.astype(flat.dtype), unique_indices=True)

    packed = gather_slices(pack(values[None], positions[None]), axis_name)
    all_values, all_positions = unpack(packed, (k, dtype), (k, jnp.int32))
    wide = at_least_float32(dtype)

    def add(total: jax.Array, entries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        # No position occurs twice in a replica's entries, so the order of sums is fixed and the
        # bits are equal everywhere.
        positions, values = entries
        return total.at[positions].add(values.astype(wide), unique_indices=True), None

    zeros = jnp.zeros_like(all_values, wide, shape=flat.shape)
    total, _ = lax.scan(add, zeros, (all_positions, all_values))
    return (total / axis_size(axis_name)).astype(dtype), lost
