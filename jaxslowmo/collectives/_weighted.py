"""Weighted means: replicas that saw more samples count more, those that ran out not at all."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, settle
from ..tree import at_least_float32
from ._reduce import all_mean, scaled


class TotalWeight(NamedTuple):
    """What all replicas weigh together."""

    weight: jax.Array  # () float32, sum of the weights
    active: jax.Array  # () float32, number of replicas with a weight above 0


def total_weight(weight: jax.Array, axis_name: AxisName) -> TotalWeight:
    """The weights of all replicas together.

    Communication: one all-reduce of 8 bytes over `axis_name`.
    """
    own = jnp.stack([_positive(weight), (weight > 0).astype(weight.dtype)])
    return TotalWeight(*_sum(own, axis_name))


def relative_weight(
    weight: jax.Array, total: TotalWeight, axis_name: AxisName, *, idle_as_zeros: bool = False
) -> jax.Array:
    """The factor that turns a plain mean over replicas into the weighted one; 0 if all weigh 0.

    With `idle_as_zeros` the mean is that in which replicas of weight 0 had sent zeros.
    """
    own = _positive(weight).astype(_precise())
    count = total.active.astype(own.dtype) if idle_as_zeros else axis_size(axis_name)
    return quotient(count * own, total.weight)


def quotient(x: jax.Array, total: jax.Array) -> jax.Array:
    """`x / total` for a scalar total, in x's dtype; 0 where the total is 0.

    Divided in at least float32: a total of 257 would be 256 in bfloat16.
    """
    wide = at_least_float32(x.dtype)
    total = total.astype(wide)
    found = x.astype(wide) / jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, found, jnp.zeros_like(found)).astype(x.dtype)


def weighted_means(
    flats: Sequence[jax.Array], weight: jax.Array, axis_name: AxisName, *, idle_as_zeros: bool
) -> list[jax.Array]:
    """Means of flat buffers over replicas, each replica with its weight.

    Args:
      flats: 1-D, of any floating dtypes.
      weight: () float32 >= 0; what a replica of weight 0 holds is ignored, NaN included.
      axis_name: mapped axis, or several.
      idle_as_zeros: make the means smaller by the share of replicas of weight 0, as if these had
        sent zeros.

    Returns:
      The means, equal over the axis; all are 0 where every weight is.

    A buffer in half precision gets the same mean whatever buffers stand beside it.

    Communication: one all-reduce per buffer over `axis_name`. The weights travel in the first
      float32 (or wider) buffer, which grows by two elements; buffers in half precision wait for it.
      Where there is none, or a float16 buffer, whose weighted sum might overflow, they have an
      all-reduce of 8 bytes of their own.
    """
    carriers = [i for i, flat in enumerate(flats) if flat.dtype.itemsize >= 4 and flat.size]
    if not carriers or any(flat.dtype == jnp.float16 for flat in flats):
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name, idle_as_zeros=idle_as_zeros)
        return [all_mean(flat, axis_name, factor=factor) for flat in flats]
    own = jnp.stack([_positive(weight), (weight > 0).astype(weight.dtype)])
    carrier = carriers[0]
    part = scaled(flats[carrier], weight)
    sums = _sum(jnp.concatenate([part, own.astype(part.dtype)]), axis_name)
    total = TotalWeight(*sums[-2:].astype(_precise()))
    factor = relative_weight(weight, total, axis_name, idle_as_zeros=idle_as_zeros)
    divisor = total.weight
    if idle_as_zeros:
        divisor = quotient(total.weight * axis_size(axis_name), total.active)

    def mean(i: int, flat: jax.Array) -> jax.Array:
        if i == carrier:
            return quotient(sums[:-2], divisor)
        # Half precision would round the sum of weighted gradients to a multiple of the weights:
        # equal gradients of replicas of 257 samples would become 256/257 of themselves.
        if flat.dtype.itemsize < 4:
            return all_mean(flat, axis_name, factor=factor)
        return quotient(_sum(scaled(flat, weight), axis_name), divisor)

    return [mean(i, flat) for i, flat in enumerate(flats)]


def _precise() -> jnp.dtype:
    """The default float dtype: under x64 it serves float64 leaves too."""
    return jnp.dtype(jnp.result_type(float))


def _positive(weight: jax.Array) -> jax.Array:
    """Weights below 0, and NaN, count as 0."""
    return jnp.where(weight > 0, weight, jnp.zeros_like(weight))


def _sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    if axis_size(axis_name) == 1 or x.size == 0:
        return settle(x, axis_name)
    return lax.psum(x, axis_name)
