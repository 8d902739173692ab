"""Codes of 4 or 8 bits: blocks of elements, each with its largest magnitude as scale."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._support.checks import check_choice, checked_int, checks_flags
from ._codec import Codec, Kind, pack, unpack

_BLOCKS_TO_ALIGN = 32


@dataclass(frozen=True, kw_only=True)
class Blocks(Codec):
    """A format of few bits per number.

    Attributes:
      name: the expression that makes it, without `error_feedback`.
      dtype: dtype of the codes.
      largest: the code of the largest magnitude in a block.
      block: elements that share a scale; the last block of a row may be shorter.
      scale: dtype of the scales.
      bits: bits of a code that are sent, 8 or 4.
      mantissa: number of mantissa bits of a floating-point code; None for integer codes.
      least_exponent: exponent below which floating-point codes are evenly spaced.
    """

    name: str
    dtype: Any
    largest: float
    block: int
    scale: Any = jnp.float32
    bits: int = 8
    mantissa: int | None = None
    least_exponent: int = 0

    def __repr__(self) -> str:
        """Return the expression that makes this codec."""
        return f"js.codecs.{self.name}block={self.block}, error_feedback={self.error_feedback})"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the codes, followed by the scale of each block; see `Codec.encode`.

        The scale of a block is its largest magnitude: 0 for a block of zeros, NaN for a block with
        a value that is not finite.
        """
        rows, size = x.shape
        blocks, width = self.num_blocks(size), self._width(size)
        padded = jnp.pad(x, ((0, 0), (0, blocks * width - size)))
        scales = scale_of(padded.reshape(rows, blocks, width), self.scale)
        ratio = ratio_of(x, self._spread(scales, size))
        noise = None if key is None else jax.random.uniform(key, (rows, size), jnp.float32)
        codes = self.codes(jnp.clip(ratio * self.largest, -self.largest, self.largest), noise)
        return pack(codes if self.bits == 8 else in_nibbles(codes), scales.astype(self.scale))

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """Return the numbers; NaN in a block whose scale is NaN. See `Codec.decode`."""
        codes, scales = unpack(sent, *self.kinds(size))
        codes = codes if self.bits == 8 else from_nibbles(codes, size)
        # Some compilers turn a division by a constant into this product. Written as a product, the
        # result is the same with all of them.
        by = self._spread(scales.astype(jnp.float32), size)
        return codes.astype(jnp.float32) * (1 / self.largest) * by

    def kinds(self, size: int) -> list[Kind]:
        """Return the sizes and dtypes of codes and scales; see `Codec.kinds`."""
        held = (size, self.dtype) if self.bits == 8 else (-(-size // 2), jnp.uint8)
        return [held, (self.num_blocks(size), self.scale)]

    def codes(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Return the codes of `x`.

        Args:
          x: float32 in [-largest, largest], of any shape.
          noise: uniform numbers in [0, 1) for stochastic rounding: a code is one of the two
            neighbours of x, and x on average. None rounds to nearest, and ties to even.
        """
        if self.mantissa is None:
            return _round(x, noise).astype(self.dtype)
        # The distance of codes around x is 2**(exponent - mantissa). Rounding in float32 makes the
        # cast exact on every platform.
        exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
        steps = jnp.maximum(exponent, self.least_exponent) - self.mantissa
        return (_round(x * _power(-steps), noise) * _power(steps)).astype(self.dtype)

    def num_blocks(self, size: int) -> int:
        """Return the number of blocks of a row of `size` elements."""
        return math.ceil(size / self.block)

    def chunk_size(self, size: int, replicas: int) -> int:
        """Return how many elements each replica sums: whole blocks if that needs little padding."""
        even = math.ceil(size / replicas)
        if even < _BLOCKS_TO_ALIGN * self.block:
            return even
        return self.num_blocks(even) * self.block

    def _spread(self, scales: jax.Array, size: int) -> jax.Array:
        return scales.repeat(self._width(size), axis=1)[:, :size]

    def _width(self, size: int) -> int:
        """Return the elements of a block; a block that is larger than the row needs no padding."""
        return max(1, min(self.block, size))


def scale_of(blocks: jax.Array, dtype: Any) -> jax.Array:
    """Return the largest magnitude along the last axis, NaN if a value is not finite.

    It is float32, and the next number of `dtype` that is not below: a scale that was rounded down
    would clip the largest numbers of its block.
    """
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    # On CPU the maximum may leave out NaN.
    is_finite = jnp.all(jnp.isfinite(blocks), axis=-1)
    scales = jnp.where(is_finite, largest, jnp.full_like(largest, jnp.nan))
    if dtype == jnp.float32:
        return scales
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    above = lax.bitcast_convert_type((bits + 0xFFFF) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(above), above, jnp.full_like(above, jnp.nan))


def ratio_of(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / scale, 0 where the scale is 0 or NaN."""
    # A compiled division may be a product with the inverse, which is 0 for the largest scales.
    is_large = scale > 2.0**120
    x, scale = (jnp.where(is_large, value * 2.0**-8, value) for value in (x, scale))
    return jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1.0), jnp.zeros_like(x))


def in_nibbles(codes: jax.Array) -> jax.Array:
    """Return codes in [-8, 7], `(r, m)`, two in a byte: those of both halves of a row."""
    half = -(-codes.shape[1] // 2)
    above = (jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2))) + 8).astype(jnp.uint8)
    return above[:, :half] | above[:, half:] << 4


def from_nibbles(held: jax.Array, size: int) -> jax.Array:
    """Return the int8 codes of rows of `size`; the inverse of `in_nibbles`."""
    both = held.__array_namespace__().concatenate([held & 0xF, held >> 4], axis=1)
    return both[:, :size].astype(jnp.int8) - np.int8(8)


def _round(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (noise < x - below).astype(x.dtype)


def _power(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent exactly."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


@checks_flags("codecs.int8")
def int8(block: int = 256, *, error_feedback: bool = True) -> Blocks:
    """Return the codec that sends numbers as 8-bit integers, with one scale per block.

    Numbers are rounded to 255 evenly spaced values, up to the largest magnitude in their block.

    Args:
      block: number of elements that share a float32 scale.
      error_feedback: whether what rounding loses is kept and sent in the next exchange.

    Returns:
      A value of `codec=` of `js.local_sgd`, `js.slowmo` and `js.diloco`, which then send how far
      replicas have moved.

    Raises:
      ValueError: a `block` below 1, or `error_feedback` that is neither True nor False.

    Communication: that of the transform, with 1 + 4 / block bytes per element: 0.254 of float32.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (blocks).
    """
    return _blocks("int8", block, error_feedback, name="int8(", dtype=jnp.int8, largest=127.0)


@checks_flags("codecs.int4")
def int4(block: int = 64, *, error_feedback: bool = True) -> Blocks:
    """Return the codec that sends numbers as 4-bit integers, with one scale per block.

    Numbers are rounded to 15 evenly spaced values, up to the largest magnitude in their block.

    Args:
      block: number of elements that share a scale, a bfloat16 that is rounded up.
      error_feedback: whether what rounding loses is kept and sent in the next exchange.

    Returns:
      A value of `codec=`, as `js.codecs.int8`.

    Raises:
      ValueError: as `js.codecs.int8`.

    Communication: that of the transform, with 1/2 + 2 / block bytes per element: 0.133 of float32.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (4 bits).
    """
    options = {"dtype": jnp.int8, "largest": 7.0, "bits": 4, "scale": jnp.bfloat16}
    return _blocks("int4", block, error_feedback, name="int4(", **options)


Format = Literal["e4m3", "e5m2"]
_FORMATS: dict[str, dict[str, Any]] = {
    "e4m3": {
        "dtype": jnp.float8_e4m3fn, "largest": 448.0, "mantissa": 3, "least_exponent": -6,
    },
    "e5m2": {
        "dtype": jnp.float8_e5m2, "largest": 57344.0, "mantissa": 2, "least_exponent": -14,
    },
}  # fmt: skip


@checks_flags("codecs.fp8")
def fp8(format: Format = "e4m3", *, block: int = 256, error_feedback: bool = True) -> Blocks:
    """Return the codec that sends numbers as 8-bit floats, with one scale per block.

    Errors are relative to the number, unless it is small against the largest in its block.

    Args:
      format: number of bits of exponent and mantissa, `"e4m3"` or `"e5m2"`.
      block: number of elements that share a float32 scale.
      error_feedback: whether what rounding loses is kept and sent in the next exchange.

    Returns:
      A value of `codec=`, as `js.codecs.int8`. Codes travel as bytes, so devices need no 8-bit
      floats.

    Raises:
      ValueError: another format, and as `js.codecs.int8`.

    Communication: that of the transform, with 1 + 4 / block bytes per element: 0.254 of float32.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    check_choice("format", format, Format, "codecs.fp8")
    return _blocks("fp8", block, error_feedback, name=f'fp8("{format}", ', **_FORMATS[format])


def _blocks(owner: str, block: object, error_feedback: bool, **options: Any) -> Blocks:
    owner = f"codecs.{owner}"
    return Blocks(
        block=checked_int(f"{owner}: `block`", block, 1),
        error_feedback=error_feedback,
        **options,
    )
