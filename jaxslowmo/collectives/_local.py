"""Sharing work between the devices of one replica, which hold the same values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, varying_axes
from ._shard_layout import shard_layout


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


def in_slices(
    flat: jax.Array,
    local_axis_name: AxisName | None,
    exchange: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`exchange(flat)`, element-wise between replicas, of which each local device does its part.

    Args:
      flat: `(n,)`, equal over `local_axis_name`.
      local_axis_name: axis inside a replica (fast network) of size L; None: no slices.
      exchange: from an array to one of its shape.

    Returns:
      `(n,)`, equal over `local_axis_name`.

    Communication: what `exchange` sends of n/L elements (padding apart, see `shard_layout`), and
      one all-gather of n over `local_axis_name`.
    """
    if local_axis_name is None or axis_size(local_axis_name) == 1 or flat.size == 0:
        return exchange(flat)
    parts = axis_size(local_axis_name)
    # Shaped like shards, so that the all-gather stays one on TPU too.
    layout = shard_layout(flat.size, parts)
    slices = jnp.pad(flat, (0, parts * layout.size - flat.size)).reshape(-1, layout.lanes)
    done = exchange(own_slice(slices, local_axis_name))
    return gather_slices(done, local_axis_name, like=flat).reshape(-1)[: flat.size]
