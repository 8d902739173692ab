"""Mean of one flat buffer over replicas."""

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, settle
from ..tree import at_least_float32
from ._local import in_slices


def _overflows_when_summed(dtype: jnp.dtype) -> bool:
    """float16 ends at 65504, so a sum may overflow where the mean would not."""
    return dtype == jnp.float16


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
    if _overflows_when_summed(flat.dtype):
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
