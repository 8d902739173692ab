"""Codecs of 16 bits."""

import jax.numpy as jnp

from ._codec import Codec


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
