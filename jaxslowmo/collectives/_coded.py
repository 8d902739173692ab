"""Mean of a flat buffer that travels in another form."""

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size
from ._local import in_slices
from ._reduce import all_mean_in_slices
from .codecs import Codec


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
