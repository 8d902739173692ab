"""Mean into shards and back: the two halves of an all-reduce, with room for an update between.

Several replica axes are taken one after the other: the first scatters the whole buffer, the next
its part. The bytes are those of one reduce-scatter, and a TPU compiler that would make an
all-reduce of one over all chips of a torus keeps the stages.

The shape of a shard decides what a TPU compiler makes of a `psum_scatter`. Compiled for v5e, v6e
and v5p slices (libtpu 0.0.51), a 1-D buffer of any size becomes a full all-reduce and a slice: 1.5
times the bytes of reduce-scatter and all-gather. What keeps a true reduce-scatter is a buffer of
`(replicas, 8 * T, 128)` float32, scattered over its first dimension untiled, T >= 3 tiles of
(8, 128) per shard:

* even T, and for large T one that a power of two near T / 200 divides: a plain reduce-scatter (the
  compiler cuts large shards into equal spans of whole tiles);
* other T: a reduce-scatter with a small permute, where the compiler pads the spans itself.

Shards under 3 tiles (12 KiB) become all-reduces whatever their shape, so they are only split
evenly. All chips of a square torus as one axis make an all-reduce of any shape; there, give
the torus as several replica axes. `tests/tpu_aot` holds the rule.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName
from ..mesh import axis_names, axis_size, between_cpu_processes, checks_varying, varying_axes
from ._permute import permute

_TILE = (8, 128)  # rows and lanes of a float32 tile
_TILE_ELEMENTS = 8 * 128
_FEWEST_TILES = 3
_TILES_PER_SPAN = 200


@dataclass(frozen=True)
class ShardLayout:
    """A shard is `(rows, lanes)`; a buffer over R replicas `(R, rows, lanes)`, zero-padded."""

    rows: int
    lanes: int

    @property
    def size(self) -> int:
        """Elements of one shard, padding included."""
        return self.rows * self.lanes


@functools.cache  # asked for every buffer whenever a program is traced
def shard_layout(num_elements: int, num_shards: int, *, num_parts: int = 1) -> ShardLayout:
    """Layout of the shards of a buffer.

    Args:
      num_elements: elements of the buffer.
      num_shards: replicas that it is split over.
      num_parts: devices of a replica that share the rows of its shard; each part is shaped.

    Returns:
      The layout. Padding per part: under 1 % or 2 tiles (8 KiB of float32), whichever is more;
      under one row of elements where parts are smaller than 3 tiles.

    Example:
      >>> shard_layout(1_000_000, 4)
      ShardLayout(rows=1968, lanes=128)
      >>> shard_layout(10, 4)
      ShardLayout(rows=3, lanes=1)
    """
    per_part = math.ceil(num_elements / (num_shards * num_parts))
    tiles = math.ceil(per_part / _TILE_ELEMENTS)
    if tiles < _FEWEST_TILES:
        return ShardLayout(max(1, per_part) * num_parts, 1)
    spans = 1 << max(0, math.ceil(math.log2(tiles / _TILES_PER_SPAN)))
    multiple = max(spans, 2)
    tiles = math.ceil(tiles / multiple) * multiple
    return ShardLayout(tiles * _TILE[0] * num_parts, _TILE[1])


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


def _in_shards(flat: jax.Array, layout: ShardLayout, num_shards: int) -> jax.Array:
    """`flat` with zeros at its end, as `(num_shards, rows, lanes)`."""
    padded = jnp.pad(flat, (0, num_shards * layout.rows * layout.lanes - flat.size))
    return padded.reshape(num_shards, layout.rows, layout.lanes)


def own_shard(flat: jax.Array, layout: ShardLayout, axis_name: AxisName) -> jax.Array:
    """This replica's `(rows, lanes)` shard of a buffer that all replicas hold alike.

    Communication: none.
    """
    shards = _in_shards(flat, layout, axis_size(axis_name))
    return lax.dynamic_index_in_dim(shards, lax.axis_index(axis_name), keepdims=False)


def _scatter_sum(shards: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sum over `axis_name` of `(num_shards, ...)`, of which this replica keeps its shard."""
    for name in axis_names(axis_name):
        size = axis_size(name)
        stage = shards.reshape(size, -1, *shards.shape[1:])
        if size == 1:
            shards = stage[0]
            continue
        if between_cpu_processes(name):
            shards = ring_scatter_sum(stage, name)
            continue
        # Lanes stay whole and rows together: how the TPU compiler keeps a true reduce-scatter.
        rows = stage.reshape(size, -1, shards.shape[-1])
        shards = _reduce_scatter(rows, name).reshape(stage.shape[1:])
    return shards[0]


def _reduce_scatter(rows: jax.Array, name: str) -> jax.Array:
    """Part of `(size, m, lanes)`, summed; `(m, lanes)`."""

    def scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, name, scatter_dimension=0, tiled=False)

    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {axis for axis, kind in types if kind == AxisType.Explicit}
    if not explicit:
        return scatter(rows)
    # jax 0.12 fails to lower it beside Explicit axes, so they are manual around it; `rows` is whole
    # along them.
    return jax.shard_map(scatter, in_specs=P(), out_specs=P(), axis_names=explicit)(rows)


def ring_scatter_sum(parts: jax.Array, axis_name: str) -> jax.Array:
    """This replica's part of the sum over `axis_name`, by a ring of permutations.

    For processes on CPU: jaxlib's reduce-scatter between them (gloo's halving and doubling, jaxlib
    0.10) is slow on a slow link: of 4 hosts at 200 Mbit/s it took 380 ms for 5.4 MB, as long as a
    whole all-reduce, and two of them sent a third more bytes than they have to. A ring took 167 ms,
    with 162 ms the least possible. Its all-gather and all-reduce are as fast as the link.

    Args:
      parts: `(replicas, ...)`, at least float32.
      axis_name: mapped axis of R replicas, R > 1.

    Returns:
      `parts[0].shape`: part i of the sum on replica i. A part is summed on its way around the ring,
      so each in another order, always the same.

    Communication: R - 1 collective-permutes of one part over `axis_name`: the bytes of one
      reduce-scatter.
    """
    count, me = axis_size(axis_name), lax.axis_index(axis_name)
    around = [(i, (i + 1) % count) for i in range(count)]

    def part(distance: int) -> jax.Array:
        """Of the replica that many places before this one."""
        return lax.dynamic_index_in_dim(parts, jnp.mod(me - distance, count), keepdims=False)

    total = part(1)
    for distance in (*range(2, count), 0):
        total = permute(total, axis_name, around) + part(distance)
    return total


def _gather(shard: jax.Array, axis_name: AxisName) -> jax.Array:
    """All shards `(num_shards, *shard)` in the order in which `_scatter_sum` deals them."""
    whole = shard
    for name in reversed(axis_names(axis_name)):
        if axis_size(name) > 1:
            # Typed as equal, as an all-reduce is: what follows is then traced once for both.
            to = "invarying" if checks_varying(name) else "varying"
            whole = lax.all_gather(whole, name, axis=0, tiled=True, to=to)
    return whole.reshape(axis_size(axis_name), *shard.shape)


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
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica; its devices hold `flat` alike and each sends only its
        part of the rows.

    Returns:
      `(rows, lanes)`, equal on the devices of one replica.

    Communication: one reduce-scatter of the padded buffer over `axis_name` (of the rest over each
      further axis); with L local devices each takes 1/L of it, and one all-gather of a shard over
      `local_axis_name` follows. None where the axis has size 1. Between processes on CPU, R - 1
      collective-permutes of a shard take the place of a reduce-scatter, with the same bytes.
    """
    count = axis_size(axis_name)
    shards = _in_shards(flat, layout, count)
    if count == 1:
        return shards[0]
    if local_axis_name is None or axis_size(local_axis_name) == 1:
        return _scatter_sum(shards, axis_name) / count
    mine = own_slice(shards, local_axis_name, dimension=1)
    part = _scatter_sum(mine, axis_name) / count
    return gather_slices(part, local_axis_name, like=flat)


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
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica; its devices hold `shard` alike and each sends only its
        part of the rows.

    Returns:
      `(size,)`, equal on all replicas.

    Communication: one all-gather of the padded buffer over `axis_name` (of a part of it over each
      further axis); with L local devices each takes 1/L of it, and one all-gather of the whole over
      `local_axis_name` follows. None where the axis has size 1.
    """
    if axis_size(axis_name) == 1:
        return shard.reshape(-1)[:size]
    if local_axis_name is None or axis_size(local_axis_name) == 1:
        return _gather(shard, axis_name).reshape(-1)[:size]
    parts = _gather(own_slice(shard, local_axis_name), axis_name)
    joined = gather_slices(parts, local_axis_name, like=shard, dimension=1)
    return joined.reshape(-1)[:size]
