"""A mean over replicas that can run beside other work, whatever the platform."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_size, is_on_tpu
from ._means import all_mean
from ._permute import permute
from ._scatter import in_slices

_MOST_REPLICAS = 16  # of more replicas the permutes would be too many


def mean_beside(
    flat: jax.Array, axis_name: AxisName, local_axis_name: AxisName | None
) -> jax.Array:
    """Return the mean of `flat` over `axis_name` by collectives that run asynchronously.

    Inside a TPU slice XLA makes every all-reduce synchronous, and permutes asynchronous (libtpu
    0.0.52). So there each of up to 16 replicas sends each other one its part of the buffer, and
    then the mean of its own part.

    Args:
      flat: `(n,)`, equal over `local_axis_name`.
      axis_name: axis between replicas.
      local_axis_name: axis inside a replica, whose devices split the work; see `in_slices`.

    Returns:
      `(n,)`, the mean, equal on all replicas.

    Communication: per device one all-reduce of n/L elements over `axis_name`; on a TPU with R
      replicas, 2 <= R <= 16, 2 (R - 1) collective-permutes of n/(L R). With `local_axis_name` an
      all-gather of n over that axis.
    """
    by_permutes = is_on_tpu(axis_name) and 2 <= axis_size(axis_name) <= _MOST_REPLICAS
    mean = functools.partial(_by_permutes if by_permutes else all_mean, axis_name=axis_name)
    return in_slices(flat, local_axis_name, mean)


def _by_permutes(x: jax.Array, axis_name: AxisName) -> jax.Array:
    count, me = axis_size(axis_name), lax.axis_index(axis_name)
    size = -(-x.size // count)
    pieces = jnp.pad(x.reshape(-1), (0, count * size - x.size)).reshape(count, size)

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return permute(x, axis_name, [(i, (i + by) % count) for i in range(count)])

    piece = pieces[me]
    for by in range(1, count):
        piece = piece + shifted(pieces[(me + by) % count], by)
    mean = piece / count
    # Its owner alone computes each piece of the mean, so all replicas hold the same bits.
    whole = pieces.at[me].set(mean)
    for by in range(1, count):
        whole = whole.at[(me - by) % count].set(shifted(mean, by))
    return whole.reshape(-1)[: x.size].reshape(x.shape)
