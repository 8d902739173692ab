"""Only the largest gradients travel."""

import math

import jax

from ...._support.checks import checked_int
from ....collectives import top_k_mean
from .._hook import CommHook, GradBucket
from ._error_feedback import lossy

_ROUNDING = 1e-9  # 0.07 * 100 is above 7


def top_k(
    ratio: float | None = None, *, k: int | None = None, error_feedback: bool = True
) -> CommHook:
    """Each replica sends its gradients of largest magnitude; the others count as 0.

    Args:
      ratio: share of a bucket's n elements that a replica sends, in (0, 1]: ceil(ratio * n) of
        them. 0.01 if neither this nor `k` is given.
      k: their number instead; whole buckets with fewer elements.
      error_feedback: add what was not sent to the next gradients; without, small gradients may
        never arrive.

    Returns:
      A `CommHook`; with error feedback its state is a residual per bucket, (n,) in the bucket's
      dtype but at least float32, which differs between replicas. All replicas get the same bits.
      Values that are not finite are sent first, and residuals that are not finite become 0. On an
      axis of size 1 gradients stay as they are.

    Raises:
      ValueError: both `ratio` and `k`, or one out of range; at trace time a bucket whose gradients
        are not float32, bfloat16, float16 or float64.

    Communication: one all-gather of R * k values, in the bucket's dtype, and int32 positions; a
      replica receives (R - 1) * k * (4 + itemsize) bytes, so with many replicas more than an
      all-reduce would send: choose a ratio well below 1 / R.

    Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
      Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """
    if ratio is not None and k is not None:
        raise ValueError(f"top_k: give `ratio` or `k`, not both, got {ratio!r} and {k!r}.")
    if k is not None:
        k = checked_int("top_k: `k`", k, 1)
    share = 0.01 if ratio is None else ratio
    if not 0 < share <= 1:
        raise ValueError(f"top_k: `ratio` must be in (0, 1], got {ratio!r}.")

    def reduce(bucket: GradBucket, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = math.ceil(share * bucket.size * (1 - _ROUNDING)) if k is None else k
        return top_k_mean(
            flat, bucket.axis_name, min(max(wanted, 1), bucket.size), dtype=bucket.dtype
        )

    return lossy("top_k", reduce, error_feedback=error_feedback)
