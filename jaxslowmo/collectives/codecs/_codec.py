"""Encodings of numbers in fewer bits, which a collective can sum or permute directly."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Codec:
    """A floating-point format in which replicas send numbers, and the handling of its errors.

    `js.codecs.bfloat16` and `js.codecs.float16` make codecs.

    Attributes:
      dtype: dtype of the numbers that are sent.
      error_feedback: whether a replica keeps the rounding error of its own numbers.
      rounds_mixtures: whether a node of gossip rounds the mixture of its own and the received
        numbers to the format, as an all-reduce in that format rounds its sum.
    """

    dtype: np.dtype
    error_feedback: bool
    rounds_mixtures: bool = False

    def __repr__(self) -> str:
        """Return the expression that makes this codec."""
        return f"js.codecs.{self.dtype.name}(error_feedback={self.error_feedback})"

    def narrows(self, dtype: np.dtype) -> bool:
        """Return whether the codec makes numbers of `dtype` smaller; others are sent unchanged."""
        return self.dtype.itemsize < dtype.itemsize

    def encode(
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
            part = self.rounded(clipped / divisor)
            sent = part * divisor
        else:
            share, has_share = factor.astype(x.dtype) / divisor, factor > 0
            part = self.rounded(jnp.where(has_share, clipped * share, jnp.zeros_like(x)))
            sent = part / jnp.where(has_share, share, jnp.ones_like(share))
        residual = x - (sent if self.error_feedback else clipped)
        if factor is not None:
            residual = jnp.where(factor > 0, residual, jnp.zeros_like(residual))
        return part.astype(self.dtype), residual

    def rounded(self, x: jax.Array) -> jax.Array:
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


def bfloat16(*, error_feedback: bool = False) -> Codec:
    """Return the codec that sends parameters as bfloat16: the range of float32, 8-bit precision.

    Args:
      error_feedback: whether each replica keeps the rounding error of its own parameters, in their
        dtype, and adds it to the values that it receives. In gossip (`js.sgp`) nothing is lost
        then. For an average it gains nothing: the mean is rounded as much, and no replica knows
        that error. Replicas then only differ by their residuals after an exchange.

    Returns:
      A value of `codec=` of `js.local_sgd`, `js.hierarchical_local_sgd`, `js.sgp`, `js.slowmo` and
      `js.diloco`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: that of the transform, with 2 bytes per element. Leaves of 16 bits or fewer are
      sent unchanged.

    Source: FairScale 0.4.13, `SlowMoDistributedDataParallel` with `fp32_params` (error feedback).
    """
    return Codec(jnp.dtype(jnp.bfloat16), _checked("bfloat16", error_feedback))


def float16(*, error_feedback: bool = False) -> Codec:
    """Return the codec that sends parameters as float16: 11-bit precision, limited range.

    The smallest number is 6e-8 times the number of replicas. A replica keeps the excess of numbers
    beyond 32768, with error feedback or without, so a finite number never becomes infinite.

    Args:
      error_feedback: whether each replica keeps its rounding error, as in `js.codecs.bfloat16`. In
        gossip each mixture is rounded too, as in FairScale, so it gains nothing there either. It is
        meant for runs that must reproduce FairScale's float16 runs.

    Returns:
      A value of `codec=`; see `js.codecs.bfloat16`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: that of the transform, as with `js.codecs.bfloat16`.

    Source: FairScale 0.4.13, `SlowMoDistributedDataParallel` with `fp32_params` (error feedback).
    """
    kept = _checked("float16", error_feedback)
    # FairScale mixes in float16. With the 8 bits of bfloat16 that would lose more than is gained.
    return Codec(jnp.dtype(jnp.float16), kept, rounds_mixtures=kept)


def _checked(owner: str, error_feedback: object) -> bool:
    if not isinstance(error_feedback, bool):
        raise ValueError(
            f"codecs.{owner}: `error_feedback` must be True or False, got {error_feedback!r}."
        )
    return error_feedback
