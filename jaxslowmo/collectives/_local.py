"""Sharing work between the devices of one replica, which hold the same values."""

import jax
from jax import lax

from .._typing import AxisName
from ..mesh import axis_names, axis_size, varying_axes


def own_slice(x: jax.Array, local_axes: AxisName, *, dimension: int = 0) -> jax.Array:
    """This device's part of `dimension`, which the size of `local_axes` must divide.

    Communication: none.
    """
    size = x.shape[dimension] // axis_size(local_axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(local_axes) * size, size, dimension)


def gather_slices(
    x: jax.Array, local_axes: AxisName, *, like: jax.Array, dimension: int = 0
) -> jax.Array:
    """The whole of which each device holds a slice along `dimension`.

    Args:
      x: this device's slice.
      local_axes: axis inside the replica, or several, outermost first.
      like: a value as varying as the result shall be: where it is typed as equal over an axis, so
        is the result.
      dimension: along which the slices join.

    Communication: one all-gather of the whole over each of `local_axes`.
    """
    for name in reversed(axis_names(local_axes)):
        tracked = name in varying_axes(lax.axis_index(name))
        to = "invarying" if tracked and name not in varying_axes(like) else "varying"
        x = lax.all_gather(x, name, axis=dimension, tiled=True, to=to)
    return x
