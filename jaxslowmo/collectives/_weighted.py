"""Weighted means: replicas that saw more samples count more, those that ran out not at all."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import AxisName
from ..mesh import axis_size, settle
from ._reduce import all_mean


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


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`factor * x` in x's dtype; 0 where the factor is 0, even if x is not finite there."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = factor.astype(wide) * x.astype(wide)
    return jnp.where(factor > 0, product, jnp.zeros_like(product)).astype(x.dtype)


def relative_weight(weight: jax.Array, total: TotalWeight, axis_name: AxisName) -> jax.Array:
    """The factor that turns a plain mean over replicas into the weighted one; 0 if all weigh 0."""
    return axis_size(axis_name) * quotient(_positive(weight), total.weight)


def quotient(x: jax.Array, total: jax.Array) -> jax.Array:
    """`x / total` for a scalar total in x's dtype; 0 where the total is 0."""
    total = total.astype(x.dtype)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), jnp.zeros_like(x))


def weighted_means(
    flats: Sequence[jax.Array], weight: jax.Array, axis_name: AxisName
) -> tuple[list[jax.Array], TotalWeight]:
    """Means of flat buffers over replicas, each replica with its weight.

    Args:
      flats: 1-D, of any floating dtypes.
      weight: () float32 >= 0; what a replica of weight 0 holds is ignored, NaN included.
      axis_name: mapped axis, or several.

    Returns:
      `(means, total)`, equal over the axis; all means are 0 where every weight is.

    Communication: one all-reduce per buffer over `axis_name`. The weights travel in the first
      float32 (or wider) buffer, which grows by two elements. Where there is none, or a float16
      buffer, whose weighted sum might overflow, they have an all-reduce of 8 bytes of their own.
    """
    carriers = [i for i, flat in enumerate(flats) if flat.dtype.itemsize >= 4 and flat.size]
    if not carriers or any(flat.dtype == jnp.float16 for flat in flats):
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name)
        return [all_mean(scaled(flat, factor), axis_name) for flat in flats], total
    own = jnp.stack([_positive(weight), (weight > 0).astype(weight.dtype)])
    parts = [scaled(flat, weight) for flat in flats]
    carrier = carriers[0]
    parts[carrier] = jnp.concatenate([parts[carrier], own.astype(parts[carrier].dtype)])
    sums = [_sum(part, axis_name) for part in parts]
    total = TotalWeight(*sums[carrier][-2:].astype(weight.dtype))
    sums[carrier] = sums[carrier][:-2]
    return [quotient(x, total.weight) for x in sums], total


def _positive(weight: jax.Array) -> jax.Array:
    """Weights below 0, and NaN, count as 0."""
    return jnp.where(weight > 0, weight, jnp.zeros_like(weight))


def _sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    if axis_size(axis_name) == 1 or x.size == 0:
        return settle(x, axis_name)
    return lax.psum(x, axis_name)
