"""Hooks that send a bucket unchanged, in fewer bits or not at all, with error feedback or without.

With error feedback, what one update loses is added to the next gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.checks import check_choice, checked_int, checked_share, checks_flags
from ..._support.types import PyTree
from ...collectives import all_mean, codecs, mean_in_codec
from ...collectives.codecs import Codec, Format, TopK
from ...mesh import axis_size, sum_over
from ...tree import at_least_float32
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


_DTYPES = ("float32", "bfloat16", "float16", "float64")

Reduce = Callable[[GradBucket, jax.Array], tuple[jax.Array, jax.Array]]
"""`reduce(bucket, flat) -> (mean, lost)`: the reduced bucket and the part of `flat` that was lost,
(n,) in the dtype of `flat`: `mean` is the mean of flat - lost over replicas."""


def error_feedback_hook(
    owner: str,
    reduce: Reduce,
    *,
    error_feedback: bool,
    compute: Callable[[Any], Any] = at_least_float32,
) -> CommHook:
    """Return a hook from a reduction that also returns what it lost.

    With error feedback the results of T updates add up to the T means, less the mean of the last
    residuals. A residual that is not finite becomes 0, so that one bad update has no lasting
    effect. On an axis of size 1 nothing is sent, so nothing is lost: gradients stay as they are.

    Args:
      owner: public name, for messages.
      reduce: reduction of buckets that are not empty, over more than one replica.
      error_feedback: whether there is a residual, (n,) per bucket and replica.
      compute: maps a bucket's dtype to the dtype of arithmetic and residual.

    Raises:
      ValueError: at trace time, a bucket of another dtype than `_DTYPES`.
    """

    def init(bucket: GradBucket) -> PyTree:
        check_dtype(owner, bucket, _DTYPES)
        if not error_feedback:
            return ()
        return jnp.zeros(bucket.size, compute(bucket.dtype))

    def update(bucket: GradBucket, residual: PyTree) -> tuple[jax.Array, PyTree]:
        check_dtype(owner, bucket, _DTYPES)
        if axis_size(bucket.axis_name) == 1 or bucket.size == 0:
            return sum_over(bucket.flat, bucket.axis_name), residual
        flat = bucket.flat.astype(compute(bucket.dtype))
        if not error_feedback:
            return reduce(bucket, flat)[0].astype(bucket.dtype), ()
        mean, lost = reduce(bucket, flat + residual)
        result = mean.astype(bucket.dtype)
        lost += mean - result.astype(mean.dtype)  # known to all replicas
        return result, jnp.where(jnp.isfinite(lost), lost, jnp.zeros_like(lost))

    return CommHook(init, update)


@checks_flags("hooks.int8")
def int8(
    *,
    block_size: int = 256,
    error_feedback: bool = True,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> CommHook:
    """Make a hook that sends gradients as 8-bit integers, with one scale per block of elements.

    A replica rounds its gradients to 255 evenly spaced values per block, up to the largest
    magnitude in the block, and sends to every other replica the chunk that this one sums, in
    float32. The means are rounded in the same way and sent to all. Without error feedback an
    element is wrong by at most 2.01/254 of the largest gradient in its block on any replica (twice
    that with stochastic rounding).

    Args:
      block_size: elements per scale, a float32.
      error_feedback: add what both roundings lost to the next gradients, so that errors do not
        accumulate: the results of T updates add up to the T means up to the rounding of one.
      stochastic_rounding: round up or down at random, to the exact value on average; replicas draw
        different numbers.
      seed: seed of these numbers, combined with the numbers of the update and of the bucket.

    Returns:
      A `CommHook`; with error feedback its state is a residual per bucket, (n,) float32, which
      differs between replicas. All replicas get the same bits. If a value is not finite on some
      replica, its block is NaN on all, and residuals that are not finite become 0. Computes in
      float32. On an axis of size 1 gradients stay as they are.

    Raises:
      ValueError: a `block_size` below 1 or a `seed` that is no int; at trace time a bucket whose
        gradients are not float32, bfloat16, float16 or float64.

    Communication: one all-to-all and one all-gather of n bytes and 4 per block each, scales
      included: 0.254 of the bytes of a float32 all-reduce with blocks of 256. Small buckets are
      padded by up to 127 bytes per replica, large ones by less than 4 %.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (blocks);
      Tang et al., "DoubleSqueeze", ICML 2019 (error feedback on both ways).
    """
    codec = codecs.int8(checked_int("int8: `block_size`", block_size, 1))
    return _codec_hook("int8", codec, error_feedback, stochastic_rounding, seed)


@checks_flags("hooks.fp8")
def fp8(
    *,
    format: Format = "e4m3",
    block_size: int = 256,
    error_feedback: bool = True,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> CommHook:
    """Make a hook that sends gradients as 8-bit floats, with one scale per block of elements.

    As `int8`, but errors are relative to the element unless it is small against the largest in its
    block: at most 1/16 of it each way for e4m3 down to 2**-14 of the largest, 1/8 for e5m2 down to
    2**-29. Better for blocks of very different magnitudes, worse for blocks of similar ones.

    Args:
      format: number of bits of exponent and mantissa, `"e4m3"` or `"e5m2"`.
      block_size: see `int8`.
      error_feedback: see `int8`.
      stochastic_rounding: see `int8`.
      seed: see `int8`.

    Returns:
      A `CommHook`, as `int8`.

    Raises:
      ValueError: another format, and as `int8`.

    Communication: as `int8`. Codes travel as bytes, so devices need no 8-bit floats.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (formats); see `int8`.
    """
    check_choice("format", format, Format, "fp8")
    codec = codecs.fp8(format, block=checked_int("fp8: `block_size`", block_size, 1))
    return _codec_hook("fp8", codec, error_feedback, stochastic_rounding, seed)


def _codec_hook(
    owner: str, codec: Codec, error_feedback: bool, stochastic: bool, seed: Any
) -> CommHook:
    checked_seed = checked_int(f"{owner}: `seed`", seed)

    def reduce(bucket: GradBucket, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = None
        if stochastic:  # a different key for each update and bucket, equal on all replicas
            assert bucket.count is not None
            key = jax.random.fold_in(jax.random.key(checked_seed), bucket.index)
            key = jax.random.fold_in(key, bucket.count)
        return mean_in_codec(flat, bucket.axis_name, codec, key=key)

    compute = lambda _: jnp.dtype(jnp.float32)  # noqa: E731
    return error_feedback_hook(owner, reduce, error_feedback=error_feedback, compute=compute)


@checks_flags("hooks.top_k")
def top_k(
    ratio: float | None = None, *, k: int | None = None, error_feedback: bool = True
) -> CommHook:
    """Make a hook with which each replica sends only its gradients of largest magnitude.

    Args:
      ratio: share of a bucket's n elements that a replica sends, in (0, 1]: ceil(ratio * n)
        elements. The default without `k` is 0.01.
      k: number of elements instead; buckets with fewer elements are sent whole.
      error_feedback: add what was not sent to the next gradients; without it small gradients may
        never be sent.

    Returns:
      A `CommHook`; with error feedback its state is a residual per bucket, (n,) in the bucket's
      dtype but at least float32, which differs between replicas. All replicas get the same bits.
      Gradients that are not sent count as 0. Values that are not finite are sent first, and
      residuals that are not finite become 0. On an axis of size 1 gradients stay as they are.

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
    share = None if k else checked_share("top_k", "ratio", 0.01 if ratio is None else ratio)

    def reduce(bucket: GradBucket, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        codec = TopK(share=share, count=k or 1, values=bucket.dtype)
        return mean_in_codec(flat, bucket.axis_name, codec)

    return error_feedback_hook("top_k", reduce, error_feedback=error_feedback)
