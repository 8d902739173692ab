"""The protocol of codecs, which send numbers as rows of bytes; and the 16-bit ones."""

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._support.checks import checks_flags

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


def bytes_of(kinds: Sequence[Kind]) -> int:
    """Return the bytes of arrays of the given sizes and dtypes."""
    return sum(size * jnp.dtype(dtype).itemsize for size, dtype in kinds)


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


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """An encoding of rows of numbers as rows of bytes; `js.codecs.int8()` makes one.

    Attributes:
      error_feedback: whether what an exchange has not sent, since a code is only near a number, is
        kept and sent in the next one.
      is_sparse: whether it sends few elements and their places, so that a mean of several replicas
        has more of them than each.
    """

    error_feedback: bool = False
    is_sparse = False

    @abstractmethod
    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return rows of numbers as rows of bytes.

        Args:
          x: array `(r, m)`, float32. A value that is not finite is NaN or infinite when decoded,
            and may make those near it NaN.
          key: PRNG key for stochastic rounding, where a codec has it; None rounds to nearest.

        Returns:
          `(r, rows, lanes)` uint8, which travels as it is on every platform.

        Communication: none.
        """

    @abstractmethod
    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """Return the numbers of rows of `size` elements, `(r, size)` float32.

        NumPy decodes a NumPy array, to the same bits on every machine.

        Communication: none.
        """

    def num_bytes(self, size: int) -> int:
        """Return the number of bytes of a row of `size` elements, padding included."""
        row = jax.ShapeDtypeStruct((1, size), jnp.float32)
        return jax.eval_shape(self.encode, row).size if size else 0

    def payload_bytes(self, size: int) -> int:
        """Return the number of bytes of a row of `size` elements without the padding at its end."""
        return bytes_of(self.kinds(size)) if size else 0

    def kinds(self, size: int) -> list[Kind]:
        """Return the arrays that a row of `size` elements is sent as; by default, its bytes."""
        return [(self.num_bytes(size), jnp.uint8)]

    def chunk_size(self, size: int, replicas: int) -> int:
        """Return how many of `size` elements each replica sums."""
        return -(-size // replicas)


@dataclass(frozen=True, kw_only=True)
class Half(Codec):
    """A floating-point format of 16 bits.

    Beside the protocol of all codecs, an all-reduce can sum its numbers, and gossip mixes them.

    Attributes:
      dtype: dtype of the numbers that are sent.
      rounds_mixtures: whether a node of gossip rounds the mixture of its own and the received
        numbers to the format, as an all-reduce in that format rounds its sum.
    """

    dtype: np.dtype
    rounds_mixtures: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        """Return the expression that makes this codec."""
        return f"js.codecs.{self.dtype.name}(error_feedback={self.error_feedback})"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """See `Codec.encode`; numbers beyond the format's range become its largest."""
        del key
        largest = float(jnp.finfo(self.dtype).max)
        near = self.round(jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x))
        return pack(near.astype(self.dtype))

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """See `Codec.decode`."""
        return unpack(sent, *self.kinds(size))[0].astype(jnp.float32)

    def kinds(self, size: int) -> list[Kind]:
        """See `Codec.kinds`."""
        return [(size, self.dtype)]

    def narrows(self, dtype: np.dtype) -> bool:
        """Return whether the codec makes numbers of `dtype` smaller; others are sent unchanged."""
        return self.dtype.itemsize < dtype.itemsize

    def part(
        self, x: jax.Array, *, divisor: int = 1, factor: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return `factor * x / divisor` in this format, and the part of `x` that it does not hold.

        Numbers beyond half of the format's range are clipped, so that sums stay in range: a finite
        number never becomes infinite. The clipped part is in the residual, with error feedback or
        without. Infinities and NaN are sent unchanged.

        Args:
          x: array of any shape, in a dtype that this codec narrows.
          divisor: number of parts that will be summed.
          factor: () float >= 0; 0 gives zeros and no residual. None: 1.

        Returns:
          An array in `dtype`, and the residual in the dtype of `x`. With error feedback
          x = residual + sent value; without it the residual is the clipped part only.

        Communication: none.
        """
        limit = 2.0 ** (jnp.finfo(self.dtype).maxexp - 1)
        clipped = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
        if factor is None:
            part = self.round(clipped / divisor)
            sent = part * divisor
        else:
            share, has_share = factor.astype(x.dtype) / divisor, factor > 0
            part = self.round(jnp.where(has_share, clipped * share, jnp.zeros_like(x)))
            sent = part / jnp.where(has_share, share, jnp.ones_like(share))
        residual = x - (sent if self.error_feedback else clipped)
        if factor is not None:
            residual = jnp.where(factor > 0, residual, jnp.zeros_like(residual))
        return part.astype(self.dtype), residual

    def round(self, x: jax.Array) -> jax.Array:
        """Return the nearest number of the format, in the dtype of `x`.

        Communication: none.
        """
        # Two casts do not work: with `xla_allow_excess_precision` XLA may remove such a pair, and
        # then the residual is 0.
        info = jnp.finfo(self.dtype)
        near = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        if info.nexp == jnp.finfo(jnp.float32).nexp:
            return near
        # `reduce_precision` flushes the format's subnormal numbers, which are evenly spaced, to 0.
        spacing = float(info.smallest_subnormal)
        subnormal = jnp.round(x / spacing) * spacing
        return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, near)


@checks_flags("codecs.bfloat16")
def bfloat16(*, error_feedback: bool = False) -> Half:
    """Return the codec that sends numbers as bfloat16: the range of float32, 8-bit precision.

    Args:
      error_feedback: whether what rounding loses is kept, in float32, and sent in the next
        exchange; in gossip (`js.sgp`) each node adds it to the values that it receives.

    Returns:
      A value of `codec=` of `js.local_sgd`, `js.hierarchical_local_sgd`, `js.sgp`, `js.slowmo` and
      `js.diloco`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: that of the transform, with 2 bytes per element. Parameters of 16 bits or fewer
      that are averaged or mixed themselves are sent unchanged.

    Source: FairScale 0.4.13, `SlowMoDistributedDataParallel` with `fp32_params` (error feedback).
    """
    return Half(dtype=jnp.dtype(jnp.bfloat16), error_feedback=error_feedback)


@checks_flags("codecs.float16")
def float16(*, error_feedback: bool = False) -> Half:
    """Return the codec that sends numbers as float16: 11-bit precision, limited range.

    Of parameters that are averaged or mixed themselves a replica keeps the excess of numbers beyond
    32768, with error feedback or without, so a finite number never becomes infinite.

    Args:
      error_feedback: whether what rounding loses is kept and sent in the next exchange. In gossip
        each mixture is rounded too, so it gains nothing there: it is meant for runs that must
        reproduce FairScale's float16 runs.

    Returns:
      A value of `codec=`; see `js.codecs.bfloat16`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: that of the transform, as with `js.codecs.bfloat16`.

    Source: FairScale 0.4.13, `SlowMoDistributedDataParallel` with `fp32_params` (error feedback).
    """
    # FairScale mixes in float16. With the 8 bits of bfloat16 that would lose more than is gained.
    return Half(
        dtype=jnp.dtype(jnp.float16),
        error_feedback=error_feedback,
        rounds_mixtures=error_feedback,
    )
