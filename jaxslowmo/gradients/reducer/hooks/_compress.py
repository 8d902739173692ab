"""Hooks that send a bucket unchanged, in half precision, or not at all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...._support.types import PyTree
from ....collectives import all_mean
from .._hook import CommHook, GradBucket, check_dtype, check_hook, stateless


def mean() -> CommHook:
    """Make a hook that takes the plain mean; other hooks can wrap it.

    Returns:
      A `CommHook` without state; the result is the same as without a hook.

    Communication: one all-reduce of the bucket in its dtype.

    Source: torch 2.13, `default_hooks.allreduce_hook`.
    """
    return stateless(lambda bucket: all_mean(bucket.flat, bucket.axis_name))


def noop() -> CommHook:
    """Make a hook that leaves gradients as they are, to measure what communication costs.

    Returns:
      A `CommHook` without state.

    Communication: none.

    Source: torch 2.13, `debugging_hooks.noop_hook`.
    """
    return stateless(lambda bucket: bucket.flat)


def fp16_compress(inner: CommHook | None = None) -> CommHook:
    """Make a hook that sends buckets as float16 and returns them in their own dtype.

    Args:
      inner: the hook that reduces the float16 bucket; None is `mean()`, which divides before it
        sums. A gradient above 65504 becomes inf.

    Returns:
      A `CommHook` with the state of `inner`.

    Raises:
      ValueError: `inner` is no hook; at trace time a bucket whose gradients are not float32,
        float64 or float16.

    Communication: as `inner` on a float16 bucket: for `mean()` one all-reduce of half the bytes of
      a float32 bucket.

    Source: torch 2.13, `default_hooks.fp16_compress_hook` and `fp16_compress_wrapper`.
    """
    return _compress("fp16_compress", jnp.float16, inner)


def bf16_compress(inner: CommHook | None = None) -> CommHook:
    """Make a hook that sends buckets as bfloat16 and returns them in their own dtype.

    Args:
      inner: the hook that reduces the bfloat16 bucket; None is `mean()`.

    Returns:
      A `CommHook` with the state of `inner`.

    Raises:
      ValueError: `inner` is no hook; at trace time a bucket whose gradients are not float32,
        float64 or bfloat16.

    Communication: as `inner` on a bfloat16 bucket: for `mean()` one all-reduce of half the bytes of
      a float32 bucket. (XLA for CPU sums bfloat16 in float32 and sends that.)

    Source: torch 2.13, `default_hooks.bf16_compress_hook` and `bf16_compress_wrapper`.
    """
    return _compress("bf16_compress", jnp.bfloat16, inner)


def _compress(owner: str, wire_dtype: Any, inner: CommHook | None) -> CommHook:
    inner = mean() if inner is None else inner
    check_hook(owner, inner)
    wire: np.dtype = jnp.dtype(wire_dtype)

    def to_wire_dtype(bucket: GradBucket) -> GradBucket:
        check_dtype(owner, bucket, ("float32", "float64", wire.name))
        if isinstance(bucket.flat, jax.ShapeDtypeStruct):
            return bucket.replace(jax.ShapeDtypeStruct(bucket.flat.shape, wire))
        return bucket.replace(bucket.flat.astype(wire))

    def init(bucket: GradBucket) -> PyTree:
        return inner.init(to_wire_dtype(bucket))

    def update(bucket: GradBucket, state: PyTree) -> tuple[Any, PyTree]:
        reduced, state = inner.update(to_wire_dtype(bucket), state)
        return reduced.astype(bucket.dtype), state

    return CommHook(init, update)
