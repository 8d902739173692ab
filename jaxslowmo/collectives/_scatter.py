"""Mean into shards and back: the two halves of an all-reduce, with room for an update between."""

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import AxisName
from ..mesh import axis_size
from ._local import gather_slices, local_axes_of, own_slice
from ._shard_layout import ShardLayout


def _padded(flat: jax.Array, layout: ShardLayout, num_shards: int) -> jax.Array:
    """`flat` with zeros at its end, as `(num_shards * rows, lanes)`."""
    flat = jnp.pad(flat, (0, num_shards * layout.size - flat.size))
    return flat.reshape(num_shards * layout.rows, layout.lanes)


def own_shard(flat: jax.Array, layout: ShardLayout, axis_name: AxisName) -> jax.Array:
    """This replica's `(rows, lanes)` shard of a buffer that all replicas hold alike.

    Communication: none.
    """
    whole = _padded(flat, layout, axis_size(axis_name))
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * layout.rows, layout.rows)


def mean_to_shards(
    flat: jax.Array,
    layout: ShardLayout,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
) -> jax.Array:
    """This replica's shard of the mean of `flat` over `axis_name`.

    Args:
      flat: `(n,)`, at least float32.
      layout: shape of a shard; replicas * rows * lanes >= n.
      axis_name: axis between replicas.
      local_axis_name: axis inside a replica; its devices hold `flat` alike and each sends only its
        part of the rows.

    Returns:
      `(rows, lanes)`, equal on the devices of one replica.

    Communication: one reduce-scatter of the padded buffer over `axis_name`; with L local devices
    each takes 1/L of it, and one all-gather of a shard over `local_axis_name` follows.
    """
    count = axis_size(axis_name)
    whole = _padded(flat, layout, count)
    if count == 1:
        return whole
    local_axes = local_axes_of(local_axis_name)
    if not local_axes or axis_size(local_axes) == 1:
        return lax.psum_scatter(whole, axis_name, scatter_dimension=0, tiled=True) / count
    # Rows of every shard are shared out between the local devices: (shards, L, rows / L, lanes).
    blocks = whole.reshape(count, layout.rows, layout.lanes).swapaxes(0, 1)
    mine = own_slice(blocks, local_axes).swapaxes(0, 1).reshape(-1, layout.lanes)
    part = lax.psum_scatter(mine, axis_name, scatter_dimension=0, tiled=True) / count
    return gather_slices(part, local_axes, like=flat)


def all_gather_shards(
    shard: jax.Array,
    size: int,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
) -> jax.Array:
    """The first `size` elements of the buffer whose shards the replicas hold.

    Args:
      shard: `(rows, lanes)`.
      size: elements of the buffer without padding.
      axis_name: axis between replicas.
      local_axis_name: axis inside a replica; its devices hold `shard` alike and each sends only its
        part of the rows.

    Returns:
      `(size,)`, equal on all replicas.

    Communication: one all-gather of the padded buffer over `axis_name`; with L local devices each
    takes 1/L of it, and one all-gather of the whole over `local_axis_name` follows.
    """
    count = axis_size(axis_name)
    local_axes = local_axes_of(local_axis_name)
    if count == 1:
        return shard.reshape(-1)[:size]
    if not local_axes or axis_size(local_axes) == 1:
        return lax.all_gather(shard, axis_name, axis=0, tiled=True).reshape(-1)[:size]
    parts = lax.all_gather(own_slice(shard, local_axes), axis_name, axis=0)
    # (replicas, rows / L, lanes) per device -> rows first, so that local parts join in order.
    joined = gather_slices(parts.swapaxes(0, 1), local_axes, like=shard)
    return joined.swapaxes(0, 1).reshape(-1)[:size]
