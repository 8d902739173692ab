"""Means of flat buffers of which fewer bytes travel: 8 bits per element, or the largest entries."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, vary_over, varying_axes
from ..tree import at_least_float32
from ._scatter import gather_slices

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
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, planes), dtype)


_BLOCKS_TO_ALIGN = 32


@dataclass(frozen=True)
class BlockFormat:
    """Numbers in 8 bits: blocks of codes, each with the largest magnitude in it.

    Attributes:
      dtype: dtype of the codes.
      largest: the code of the largest magnitude in a block.
      mantissa: bits behind the point of a floating code; None for an integer.
      least_exponent: exponent of a floating code below which codes are evenly spaced.
      block_size: elements that share a float32 scale; the last block of a row may be shorter.
    """

    dtype: Any
    largest: float
    mantissa: int | None = None
    least_exponent: int = 0
    block_size: int = 256

    def codes(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Codes of `x`, float32 in [-largest, largest].

        Args:
          x: any shape.
          noise: uniform in [0, 1): a code is one of the two neighbours of x, and x on average. None
            takes the nearest, of two the even one.
        """
        if self.mantissa is None:
            return _rounded(x, noise).astype(self.dtype)
        # The distance of codes around x is 2**(exponent - mantissa). Rounding is done here in
        # float32, so the cast is exact on every platform.
        exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
        steps = jnp.maximum(exponent, self.least_exponent) - self.mantissa
        return (_rounded(x * _power(-steps), noise) * _power(steps)).astype(self.dtype)

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return rows of numbers as rows of bytes: codes, and behind them the scale of each block.

        Args:
          x: `(r, m)` float32.
          key: for stochastic rounding; None rounds to nearest.

        Returns:
          `(r, rows, lanes)` uint8, as `pack` has it. The scale of a block is its largest magnitude:
          0 for a block of zeros, NaN for one in which something is not finite.
        """
        rows, size = x.shape
        blocks = self.num_blocks(size)
        padded = jnp.pad(jnp.abs(x), ((0, 0), (0, blocks * self.block_size - size)))
        scales = jnp.max(padded.reshape(rows, blocks, self.block_size), axis=2)
        scales = jnp.where(jnp.isfinite(scales), scales, jnp.full_like(scales, jnp.nan))
        by = jnp.repeat(scales, self.block_size, axis=1)[:, :size]
        # NaN is not above 0 either.
        ratio = jnp.where(by > 0, x / jnp.where(by > 0, by, 1.0), jnp.zeros_like(x))
        noise = None if key is None else jax.random.uniform(key, (rows, size), jnp.float32)
        return pack(
            self.codes(jnp.clip(ratio * self.largest, -self.largest, self.largest), noise), scales
        )

    def decode(self, packed: jax.Array, size: int) -> jax.Array:
        """`(r, size)` float32; a block with scale NaN is NaN."""
        kinds = (size, self.dtype), (self.num_blocks(size), jnp.float32)
        codes, scales = unpack(packed, *kinds)
        by = jnp.repeat(scales, self.block_size, axis=1)[:, :size]
        # Compilers make this of a division by a constant, or do not; so it is the same everywhere.
        return codes.astype(jnp.float32) * (1 / self.largest) * by

    def num_blocks(self, size: int) -> int:
        """Blocks of a row of `size` elements."""
        return math.ceil(size / self.block_size)

    def chunk_size(self, size: int, replicas: int) -> int:
        """Elements that each replica sums; whole blocks unless that is much padding."""
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
    """2**exponent, exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def quantised_mean(
    flat: jax.Array,
    axis_name: AxisName,
    how: BlockFormat,
    *,
    dtype: jnp.dtype,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean of `flat` over replicas, and what got lost on the way.

    Each replica sums one chunk. Its own part of that chunk does not travel, so it is exact; in its
    place in `lost` stands the error of the rounded mean, times the number of replicas:

        sum over replicas of (flat - lost) / replicas = mean

    up to rounding in float32. A replica that adds `lost` to the next `flat` makes up for it.

    Args:
      flat: `(n,)` float32, n > 0.
      axis_name: mapped axis, or several, of R > 1 replicas.
      how: format on the wire.
      dtype: of the mean.
      key: equal on all replicas, for stochastic rounding; None rounds to nearest.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`, NaN in a
      block in which a value of some replica is not finite; and `(n,)` float32 `lost`.

    Communication: one all-to-all and one all-gather over `axis_name`, each of n bytes and 4 per
      block (padding apart); of several axes, an all-gather over each.
    """
    replicas, size = axis_size(axis_name), flat.shape[0]
    me = lax.axis_index(axis_name)
    to_chunk, to_all = (
        (None, None) if key is None else jax.random.split(jax.random.fold_in(key, me))
    )
    per = how.chunk_size(size, replicas)
    chunks = jnp.pad(flat, (0, replicas * per - size)).reshape(replicas, per)
    chunks = vary_over(chunks, axis_names(axis_name))

    sent = how.encode(chunks, to_chunk)
    mine = (jnp.arange(replicas, dtype=me.dtype) == me)[:, None]
    parts = jnp.where(mine, chunks, how.decode(exchange(sent, axis_name), per))
    mean = jnp.sum(parts, axis=0) / replicas
    gathered = gather(how.encode(mean[None], to_all), axis_name)
    means = how.decode(gathered, per).astype(dtype)

    own = lax.dynamic_index_in_dim(means, me, keepdims=False).astype(jnp.float32)
    lost = jnp.where(mine, replicas * (mean - own), chunks - how.decode(sent, per))
    return means.reshape(-1)[:size], lost.reshape(-1)[:size]


def top_k_mean(
    flat: jax.Array, axis_name: AxisName, k: int, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Mean over replicas of the k entries of largest magnitude of each, and what was not sent.

    Args:
      flat: `(n,)`, at least float32.
      axis_name: mapped axis, or several, of R replicas.
      k: 1 to n. Entries that are not finite come first.
      dtype: of the mean, and in which values travel.

    Returns:
      `(n,)` mean, with the same bits on all replicas and typed as equal over `axis_name`; and
      `(n,)` in the dtype of `flat`, what each entry lacks of it.

    Communication: one all-gather over `axis_name` of R * k values and int32 positions (of parts of
      it over each of several axes).
    """
    flat = vary_over(flat, axis_names(axis_name))
    magnitude = jnp.where(jnp.isnan(flat), jnp.full_like(flat, jnp.inf), jnp.abs(flat))
    positions = lax.top_k(magnitude, k)[1].astype(jnp.int32)
    values = flat[positions].astype(dtype)
    lost = flat.at[positions].add(-values.astype(flat.dtype), unique_indices=True)

    packed = gather(pack(values[None], positions[None]), axis_name)
    all_values, all_positions = unpack(packed, (k, dtype), (k, jnp.int32))
    wide = at_least_float32(dtype)

    def add(total: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        # No position occurs twice, so the order of sums is fixed: equal bits everywhere.
        where, what = one
        return total.at[where].add(what.astype(wide), unique_indices=True), None

    # As varying as what is added: a scan keeps the type of what it carries.
    zeros = vary_over(jnp.zeros(flat.shape, wide), varying_axes(packed))
    total, _ = lax.scan(add, zeros, (all_positions, all_values))
    return (total / axis_size(axis_name)).astype(dtype), lost
