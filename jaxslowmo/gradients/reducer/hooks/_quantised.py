"""Gradients travel in 8 bits."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...._support.checks import checked_int
from ....collectives import E4M3, E5M2, INT8, Codec, Quantised, quantised_mean
from .._hook import CommHook, GradBucket
from ._error_feedback import lossy

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def int8(
    *,
    block_size: int = 256,
    error_feedback: bool = True,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> CommHook:
    """All-reduce in 8-bit integers, each block of elements with its own scale.

    A replica rounds its gradients to 255 evenly spaced values per block, up to the largest
    magnitude in the block, and sends each other replica the chunk that this one sums, in float32.
    The means are rounded alike and sent to all. Without error feedback an element is wrong by at
    most 2.01/254 of the largest gradient in its block on any replica (twice that with stochastic
    rounding).

    Args:
      block_size: elements per scale, a float32.
      error_feedback: add what rounding lost, on either way, to the next gradients, so that errors
        do not pile up: the results of T updates add up to the T means up to the rounding of one.
      stochastic_rounding: round up or down at random, to the exact value on average; replicas draw
        different numbers.
      seed: of these, with the number of the update and of the bucket.

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
    return _quantised("int8", INT8, block_size, error_feedback, stochastic_rounding, seed)


def fp8(
    *,
    format: Literal["e4m3", "e5m2"] = "e4m3",
    block_size: int = 256,
    error_feedback: bool = True,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> CommHook:
    """All-reduce in 8-bit floats, each block of elements with its own scale.

    As `int8`, but errors are relative to the element, as far as it is not small against the largest
    in its block: 1/16 of it at most each way for e4m3 down to 2**-14 of the largest, 1/8 for e5m2
    down to 2**-29. Better for blocks of very different magnitudes, worse for even ones.

    Args:
      format: `"e4m3"` or `"e5m2"`: bits of exponent and mantissa.
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
    if format not in _FORMATS:
        raise ValueError(f'fp8: `format` must be "e4m3" or "e5m2", got {format!r}.')
    codec = _FORMATS[format]
    return _quantised("fp8", codec, block_size, error_feedback, stochastic_rounding, seed)


def _quantised(
    owner: str, codec: Codec, block_size: Any, error_feedback: bool, stochastic: bool, seed: Any
) -> CommHook:
    how = Quantised(codec, checked_int(f"{owner}: `block_size`", block_size, 1))
    checked_seed = checked_int(f"{owner}: `seed`", seed)

    def reduce(bucket: GradBucket, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = _key(checked_seed, bucket) if stochastic else None
        return quantised_mean(flat, bucket.axis_name, how, dtype=bucket.dtype, key=key)

    return lossy(
        owner,
        reduce,
        error_feedback=error_feedback,
        compute=lambda _: jnp.dtype(jnp.float32),
    )


def _key(seed: int, bucket: GradBucket) -> jax.Array:
    """Another for each update and bucket; equal on all replicas."""
    assert bucket.count is not None
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), bucket.index), bucket.count)
