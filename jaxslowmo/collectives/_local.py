"""Sharing work between the devices of one replica, which hold the same values."""

import jax
from jax import lax

from .._typing import AxisName
from ..mesh import axis_names, axis_size, varying_axes


def own_slice(x: jax.Array, local_axis_name: AxisName) -> jax.Array:
    """This device's part of the leading dimension, which the axis size must divide.

    Communication: none.
    """
    size = x.shape[0] // axis_size(local_axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(local_axis_name) * size, size)


def gather_slices(x: jax.Array, local_axes: tuple[str, ...], *, like: jax.Array) -> jax.Array:
    """The whole of which each device holds a slice along the leading dimension.

    Args:
      x: this device's slice.
      local_axes: axes inside the replica, outermost first.
      like: a value as varying as the result shall be: where it is typed as equal over an axis, so
        is the result.

    Communication: one all-gather of the whole over each of `local_axes`.
    """
    for name in reversed(local_axes):
        tracked = name in varying_axes(lax.axis_index(name))
        to = "invarying" if tracked and name not in varying_axes(like) else "varying"
        x = lax.all_gather(x, name, axis=0, tiled=True, to=to)
    return x


def local_axes_of(local_axis_name: AxisName | None) -> tuple[str, ...]:
    """Axes inside a replica as a tuple; empty for None."""
    return () if local_axis_name is None else axis_names(local_axis_name)
