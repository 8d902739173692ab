"""Numbers in 8 bits: blocks of codes, each with the largest magnitude in it."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Codec:
    """What 8 bits stand for.

    Attributes:
      dtype: of the codes.
      largest: the code of the largest magnitude in a block.
      mantissa: bits behind the point of a floating code; None for an integer.
      least_exponent: of a floating code, below which codes are evenly spaced.
    """

    dtype: Any
    largest: float
    mantissa: int | None = None
    least_exponent: int = 0

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


INT8 = Codec(jnp.int8, 127.0)
E4M3 = Codec(jnp.float8_e4m3fn, 448.0, mantissa=3, least_exponent=-6)
E5M2 = Codec(jnp.float8_e5m2, 57344.0, mantissa=2, least_exponent=-14)


def quantise(
    x: jax.Array, codec: Codec, block_size: int, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of the rows of `x`.

    Args:
      x: `(r, m)` float32.
      codec: what the codes are.
      block_size: elements that share a scale; the last block of a row may be shorter.
      key: for stochastic rounding; None rounds to nearest.

    Returns:
      Codes `(r, m)` in the codec's dtype, and `(r, ceil(m / block_size))` float32 largest
      magnitudes: 0 for a block of zeros, NaN for one in which something is not finite.
    """
    rows, size = x.shape
    scales = jnp.max(_blocks(jnp.abs(x), block_size), axis=2)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.full_like(scales, jnp.nan))
    by = jnp.repeat(scales, block_size, axis=1)[:, :size]
    # NaN is not above 0 either.
    ratio = jnp.where(by > 0, x / jnp.where(by > 0, by, 1.0), jnp.zeros_like(x))
    noise = None if key is None else jax.random.uniform(key, (rows, size), jnp.float32)
    scaled = jnp.clip(ratio * codec.largest, -codec.largest, codec.largest)
    return codec.codes(scaled, noise), scales


def dequantise(codes: jax.Array, scales: jax.Array, codec: Codec, block_size: int) -> jax.Array:
    """`(r, m)` float32 of codes and scales; a block with scale NaN is NaN."""
    by = jnp.repeat(scales, block_size, axis=1)[:, : codes.shape[1]]
    # Compilers make this of a division by a constant, or do not; so it is the same everywhere.
    return codes.astype(jnp.float32) * (1 / codec.largest) * by


def num_blocks(size: int, block_size: int) -> int:
    """Blocks of a row of `size` elements."""
    return math.ceil(size / block_size)


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """`(r, blocks, block_size)`, zeros behind the end."""
    rows, size = x.shape
    blocks = num_blocks(size, block_size)
    padded = jnp.pad(x, ((0, 0), (0, blocks * block_size - size)))
    return padded.reshape(rows, blocks, block_size)


def _rounded(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (noise < x - below).astype(x.dtype)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)
