"""Numbers in fewer bits, which a collective can sum or permute as they are."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Codec:
    """A floating format in which numbers travel, and what becomes of what it does not hold.

    Made by `js.codecs.bfloat16` and `js.codecs.float16`.

    Attributes:
      dtype: of what travels.
      error_feedback: whether a replica keeps what rounding left of its own numbers.
      rounds_mixtures: whether what a node of gossip makes of its own and the received numbers is
        rounded to the format, as the sum of an all-reduce in it is.
    """

    dtype: np.dtype
    error_feedback: bool
    rounds_mixtures: bool = False

    def __repr__(self) -> str:
        """As it is written."""
        return f"js.codecs.{self.dtype.name}(error_feedback={self.error_feedback})"

    def narrows(self, dtype: np.dtype) -> bool:
        """Whether numbers of this dtype become smaller by it; others travel as they are."""
        return self.dtype.itemsize < dtype.itemsize

    def encode(
        self, x: jax.Array, *, divisor: int = 1, factor: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """What of `factor * x / divisor` travels, and what of `x` does not.

        Numbers beyond half of the format's range are cut off there, so that sums stay in range: a
        finite number never becomes infinite, and what is cut off stays here, with error feedback or
        without. What is not finite travels as it is.

        Args:
          x: in a dtype that this narrows.
          divisor: how many parts are to be summed.
          factor: () float >= 0; where it is 0 nothing travels, and nothing stays. None: 1.

        Returns:
          An array in `dtype`, and the residual in the dtype of `x`: what it keeps, so that
          x = residual + what has travelled, with error feedback; else what was cut off.

        Communication: none.
        """
        limit = 2.0 ** (jnp.finfo(self.dtype).maxexp - 1)
        held = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
        if factor is None:
            part = self.rounded(held / divisor)
            travelled = part * divisor
        else:
            share, has_share = factor.astype(x.dtype) / divisor, factor > 0
            part = self.rounded(jnp.where(has_share, held * share, jnp.zeros_like(x)))
            travelled = part / jnp.where(has_share, share, jnp.ones_like(share))
        residual = x - (travelled if self.error_feedback else held)
        if factor is not None:
            residual = jnp.where(factor > 0, residual, jnp.zeros_like(residual))
        return part.astype(self.dtype), residual

    def rounded(self, x: jax.Array) -> jax.Array:
        """The nearest number of the format, in the dtype of `x`.

        Communication: none.
        """
        # A cast there and back would do, but XLA may compute more precisely than it is asked to
        # (`xla_allow_excess_precision`), take such a pair away, and with it the residual.
        info = jnp.finfo(self.dtype)
        near = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        if info.nexp == jnp.finfo(jnp.float32).nexp:
            return near
        # That makes 0 of the format's subnormal numbers, which are evenly spaced.
        spacing = float(info.smallest_subnormal)
        subnormal = jnp.round(x / spacing) * spacing
        return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, near)


def bfloat16(*, error_feedback: bool = False) -> Codec:
    """Parameters travel as bfloat16: the range of float32, 8 bits of precision.

    Args:
      error_feedback: keep on each replica, in the dtype of the parameters, what rounding leaves of
        its own, and add it to what arrives. In gossip (`js.sgp`) nothing is lost then. For an
        average it gains nothing: the mean is rounded too, which no replica knows or keeps, and that
        is as much. Replicas then only differ by their residuals after an exchange.

    Returns:
      A value of `codec=` of `js.local_sgd`, `js.hierarchical_local_sgd`, `js.sgp`, `js.slowmo` and
      `js.diloco`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: what the transform sends, at 2 bytes per element. Leaves of 16 bits or fewer
      travel as they are.

    Source: FairScale 0.4.13, `SlowMoDistributedDataParallel` with `fp32_params` (error feedback).
    """
    return Codec(jnp.dtype(jnp.bfloat16), _checked("bfloat16", error_feedback))


def float16(*, error_feedback: bool = False) -> Codec:
    """Parameters travel as float16: 11 bits of precision, down to 6e-8 times the replicas.

    Of numbers beyond 32768 the excess stays on the replica, with error feedback or without: a
    finite number never becomes infinite.

    Args:
      error_feedback: keep what rounding leaves, like `js.codecs.bfloat16`. In gossip each mixture
        is rounded, too, as in FairScale, so that it gains nothing there either: it is for runs that
        must do as FairScale's float16 runs do.

    Returns:
      A value of `codec=`; see `js.codecs.bfloat16`.

    Raises:
      ValueError: `error_feedback` that is neither True nor False.

    Communication: as `js.codecs.bfloat16`.

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
