"""Means of flat buffers over replicas: plain, weighted, and in another form on the way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, settle
from ..tree import at_least_float32
from ._scatter import in_slices
from .codecs import Codec


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`factor * x` in x's dtype; 0 where the factor is 0, even if x is not finite there."""
    wide = at_least_float32(x.dtype)
    product = factor.astype(wide) * x.astype(wide)
    return jnp.where(factor > 0, product, jnp.zeros_like(product)).astype(x.dtype)


def all_mean(flat: jax.Array, axis_name: AxisName, *, factor: jax.Array | None = None) -> jax.Array:
    """Mean of `flat` over `axis_name`, in its dtype.

    Args:
      flat: any shape.
      axis_name: mapped axis, or several.
      factor: () float, what this replica's `flat` is multiplied with; 0 leaves it out, whatever it
        holds. None: 1.

    Returns:
      The mean, equal (and typed as unvarying) over `axis_name`. The sum is divided, so 2 or 4
      replicas that agree keep their value, more of them up to rounding; float16 is divided first,
      so it cannot overflow.

    Communication: one all-reduce of `flat` over `axis_name`; none where its size is 1.
    """
    count = axis_size(axis_name)
    if count == 1 or flat.size == 0:
        return settle(flat if factor is None else scaled(flat, factor), axis_name)
    if flat.dtype == jnp.float16:  # ends at 65504: a sum may overflow where the mean would not
        part = _divided(flat, count) if factor is None else scaled(flat, factor / count)
        return lax.psum(part, axis_name)
    return _divided(lax.psum(flat if factor is None else scaled(flat, factor), axis_name), count)


def _divided(x: jax.Array, count: int) -> jax.Array:
    """`x / count` in x's dtype, by way of float32 where that might not hold the count.

    In bfloat16, 257 is 256.
    """
    if count <= 2 ** (jnp.finfo(x.dtype).nmant + 1):
        return x / count
    return (x.astype(at_least_float32(x.dtype)) / count).astype(x.dtype)


def all_mean_in_slices(
    flat: jax.Array,
    axis_name: AxisName,
    local_axis_name: AxisName | None,
    *,
    factor: jax.Array | None = None,
) -> jax.Array:
    """`all_mean` of a buffer that all devices along `local_axis_name` hold alike.

    Each of the L devices reduces only its 1/L of the buffer between replicas; an all-gather inside
    the replica restores the whole.

    Args:
      flat: `(n,)`, equal over `local_axis_name`.
      axis_name: axis between replicas (slow network).
      local_axis_name: axis inside a replica (fast network); None: every device reduces all.
      factor: as in `all_mean`.

    Returns:
      The mean over `axis_name`, `(n,)`.

    Communication: per device one all-reduce of n/L elements over `axis_name`, so n per replica, and
      one all-gather of n over `local_axis_name` (padding apart, see `shard_layout`).
    """
    if axis_size(axis_name) == 1:
        return all_mean(flat, axis_name, factor=factor)
    return in_slices(flat, local_axis_name, lambda part: all_mean(part, axis_name, factor=factor))


class TotalWeight(NamedTuple):
    """What all replicas weigh together."""

    weight: jax.Array  # () float32, sum of the weights
    active: jax.Array  # () float32, number of replicas with a weight above 0


def total_weight(weight: jax.Array, axis_name: AxisName) -> TotalWeight:
    """The weights of all replicas together.

    Communication: one all-reduce of 8 bytes over `axis_name`.
    """
    return TotalWeight(*_sum(_with_active(weight), axis_name))


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
    carrier = carriers[0]
    own, part = _with_active(weight), scaled(flats[carrier], weight)
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


def _with_active(weight: jax.Array) -> jax.Array:
    """(2,): the weight, and whether it counts, as numbers that replicas add up."""
    return jnp.stack([_positive(weight), (weight > 0).astype(weight.dtype)])


def _positive(weight: jax.Array) -> jax.Array:
    """Weights below 0, and NaN, count as 0."""
    return jnp.where(weight > 0, weight, jnp.zeros_like(weight))


def _sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    if axis_size(axis_name) == 1 or x.size == 0:
        return settle(x, axis_name)
    return lax.psum(x, axis_name)


def coded_mean(
    flat: jax.Array,
    codec: Codec,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    *,
    factor: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean of what travels of the replicas' `flat`, and what of this replica's does not.

    A replica divides before it rounds, so that a sum is in range where the mean is.

    Args:
      flat: any shape. What the codec does not narrow travels as it is.
      codec: in which form it travels.
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica, as in `all_mean_in_slices`.
      factor: as in `all_mean`.

    Returns:
      The mean, equal (and typed as unvarying) over `axis_name`, and this replica's residual, both
      in the dtype of `flat`. With error feedback the mean of the replicas' `flat` is this mean plus
      that of the residuals, up to what the sum itself rounds.

    Communication: one all-reduce over `axis_name` of n elements in the dtype of the codec, in which
      it is summed where the backend does so; with `local_axis_name` of 1/L of them per device, and
      one all-gather of n over that axis. None where the size of the axis is 1.
    """
    count = axis_size(axis_name)
    if count == 1 or flat.size == 0 or not codec.narrows(flat.dtype):
        mean = all_mean_in_slices(flat, axis_name, local_axis_name, factor=factor)
        return mean, jnp.zeros_like(flat)
    part, residual = codec.encode(flat, divisor=count, factor=factor)
    total = in_slices(part, local_axis_name, lambda x: lax.psum(x, axis_name))
    return total.astype(flat.dtype), residual
