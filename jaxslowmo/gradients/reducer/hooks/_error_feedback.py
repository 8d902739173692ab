"""Hooks that lose something: what got lost is added to the next gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...._support.types import PyTree
from ....mesh import axis_names, axis_size, settle, vary_over
from ....tree import at_least_float32
from .._hook import CommHook, GradBucket, check_dtype

_DTYPES = ("float32", "bfloat16", "float16", "float64")

Reduce = Callable[[GradBucket, jax.Array], tuple[jax.Array, jax.Array]]
"""`reduce(bucket, flat) -> (mean, lost)`: (n,) in the bucket's dtype, and of `flat`, (n,) in at
least float32, what did not arrive: the mean of flat - lost over the replicas is the result."""


def lossy(
    owner: str,
    reduce: Reduce,
    *,
    error_feedback: bool,
    compute: Callable[[Any], Any] = at_least_float32,
) -> CommHook:
    """A hook from a reduction that tells what it lost.

    With error feedback the results of T updates add up to the T means, less the mean of the last
    residuals. A residual that is not finite becomes 0, so that one bad update does not stay for
    ever. On an axis of size 1 nothing is sent and so nothing lost: gradients stay as they are.

    Args:
      owner: public name, for messages.
      reduce: of buckets that are not empty, over more than one replica.
      error_feedback: whether there is a residual, (n,) per bucket and replica.
      compute: dtype to compute in, and of the residual, for a dtype of a bucket.

    Raises:
      ValueError: at trace time, another dtype.
    """

    def init(bucket: GradBucket) -> PyTree:
        check_dtype(owner, bucket, _DTYPES)
        if not error_feedback:
            return ()
        zeros = jnp.zeros(bucket.size, compute(bucket.dtype))
        return vary_over(zeros, axis_names(bucket.axis_name))

    def update(bucket: GradBucket, residual: PyTree) -> tuple[jax.Array, PyTree]:
        check_dtype(owner, bucket, _DTYPES)
        if axis_size(bucket.axis_name) == 1 or bucket.size == 0:
            return settle(bucket.flat, bucket.axis_name), residual
        flat = bucket.flat.astype(compute(bucket.dtype))
        if not error_feedback:
            return reduce(bucket, flat)[0], ()
        mean, lost = reduce(bucket, flat + residual)
        return mean, jnp.where(jnp.isfinite(lost), lost, jnp.zeros_like(lost))

    return CommHook(init, update)
