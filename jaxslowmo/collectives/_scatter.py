"""The two halves of an all-reduce, with an update between them; and permutations of values.

Several replica axes are reduced one after the other: the first scatters the whole buffer, the next
one scatters its part. The bytes are those of one reduce-scatter. A TPU compiler keeps these stages,
while it turns one reduce-scatter over all chips of a torus into an all-reduce.

The shape of a shard decides how a TPU compiler compiles a `psum_scatter`. For v5e, v6e and v5p
slices (libtpu 0.0.51) a 1-D buffer of any size becomes a full all-reduce and a slice: 1.5 times the
bytes of reduce-scatter and all-gather. The compiler keeps a true reduce-scatter for a float32
buffer of `(replicas, 8 * T, 128)`, scattered over its first dimension untiled, with T >= 3 tiles of
(8, 128) per shard:

* even T, and for large T one that a power of two near T / 200 divides: a plain reduce-scatter (the
  compiler cuts large shards into equal spans of whole tiles);
* other T: a reduce-scatter with a small permute, where the compiler pads the spans itself.

Shards under 3 tiles (12 KiB) become all-reduces in any shape, so they are only split evenly. With
all chips of a square torus as one axis, every shape becomes an all-reduce; use several replica axes
there. `tests/tpu_aot` tests these rules.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.scopes import PADDING
from .._support.types import AxisName, checks_varying, tracks_types
from ..mesh import (
    axis_names,
    axis_size,
    is_between_cpu_processes,
    is_device_axis,
    platform,
    sum_over,
)
from .codecs import Codec

# When two processes swap large messages over one TCP connection, acknowledgements wait for the
# data of the other direction. Swapping 5.4 MB between hosts at 200 Mbit/s took 430 ms in one piece,
# 245 ms in pieces of 512 KiB and 222 ms in pieces of 256 KiB; the link's limit is 217 ms.
_PIECE_BYTES = 2**18

Permutation = Sequence[tuple[int, int]]  # pairs (source, destination); may leave out nodes


def permute(x: jax.Array, axis_name: AxisName, permutation: Permutation) -> jax.Array:
    """Send `x` from every source in `permutation` to its destination.

    Args:
      x: array of any shape.
      axis_name: mapped axis of the nodes; over several, nodes count in row-major order.
      permutation: (source, destination) pairs, in which a node is source at most once and
        destination at most once.

    Returns:
      The `x` of this node's source, or zeros on a node without one.

    Communication: one collective-permute of `x` over `axis_name`; only the pairs in `permutation`
      send. Between processes on CPU it runs in pieces of 256 KiB, one after the other.
    """
    if is_device_axis(axis_name):
        axis, pairs = _in_mesh_order(axis_name, permutation)
        if x.nbytes > _PIECE_BYTES and is_between_cpu_processes(axis_name):
            return _in_pieces(lambda piece: lax.ppermute(piece, axis, pairs), x)
        return lax.ppermute(x, axis, pairs)
    # vmap permutes only whole axes, and one at a time; its all-gather sends nothing.
    source_of = np.full(axis_size(axis_name), -1)
    for source, destination in permutation:
        source_of[destination] = source
    mine = jnp.asarray(source_of)[lax.axis_index(axis_name)]
    return jnp.where(mine < 0, 0, all_gather_under_vmap(x, axis_name)[mine])


def all_gather_under_vmap(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the `x` of all nodes under vmap, `(nodes, *s)`, with axes in the order of names."""
    for name in reversed(axis_names(axis_name)):
        x = lax.all_gather(x, name)
    return x.reshape(-1, *x.shape[len(axis_names(axis_name)) :])


def _in_pieces(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `send(x)`, computed in a loop over pieces of equal size and on the remainder."""
    size = _PIECE_BYTES // x.dtype.itemsize
    flat = x.reshape(-1)
    whole = flat.size - flat.size % size
    arrived = [lax.map(send, flat[:whole].reshape(-1, size)).reshape(-1)]
    if whole < flat.size:
        arrived.append(send(flat[whole:]))
    return jnp.concatenate(arrived).reshape(x.shape)


def _in_mesh_order(
    axis_name: AxisName, permutation: Permutation
) -> tuple[AxisName, list[tuple[int, int]]]:
    """Return axis and pairs with nodes numbered in the order of the mesh's axes.

    `lax.ppermute` numbers nodes that way; `lax.axis_index` and other collectives number them in the
    order in which the axes are named.
    """
    names = axis_names(axis_name)
    in_mesh = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in names]
    sizes = [axis_size(name) for name in names]
    named = np.arange(axis_size(axis_name)).reshape(sizes)
    # place[i]: position in the mesh of the i-th node in the order of the names
    place = np.argsort(named.transpose([names.index(name) for name in in_mesh]).ravel())
    pairs = [(int(place[s]), int(place[d])) for s, d in permutation]
    return (tuple(in_mesh) if isinstance(axis_name, tuple) else axis_name), pairs


_TILE = (8, 128)  # rows and lanes of a float32 tile
_TILE_ELEMENTS = 8 * 128
_FEWEST_TILES = 3
_TILES_PER_SPAN = 200


def padding_scope(padded: int, used: int) -> contextlib.AbstractContextManager[Any]:
    """Return a scope for collectives that send `padded` elements or bytes, of which `used` count.

    Reports read it: `js.comm_report` lists the rest as padding.
    """
    if padded == used:
        return contextlib.nullcontext()
    return jax.named_scope(f"{PADDING}{padded - used}of{padded}")


def codec_scope(codec: Codec, size: int) -> contextlib.AbstractContextManager[Any]:
    """Return the `padding_scope` of collectives that send rows of `size` elements in a codec."""
    return padding_scope(codec.num_bytes(size), codec.payload_bytes(size))


class ShardLayout(NamedTuple):
    """The shape of a shard; a buffer over R replicas is `(R, rows, lanes)`, padded with zeros."""

    rows: int
    lanes: int


@functools.cache  # called for every buffer whenever a program is traced
def shard_layout(num_elements: int, num_shards: int, *, num_parts: int = 1) -> ShardLayout:
    """Return the layout of the shards of a buffer.

    Args:
      num_elements: number of elements of the buffer.
      num_shards: number of replicas that the buffer is split over.
      num_parts: number of devices of a replica that share the rows of its shard; every part has a
        shape that follows the rules above.

    Returns:
      The layout. Padding per part is under 1 % or 2 tiles (8 KiB of float32), whichever is more,
      and under one row of elements if parts are smaller than 3 tiles.

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


def local_slice(x: jax.Array, local_axes: AxisName, *, dimension: int = 0) -> jax.Array:
    """Return this device's part of `dimension`, which the size of `local_axes` must divide.

    Communication: none.
    """
    if axis_size(local_axes) == 1:
        return x
    size = x.shape[dimension] // axis_size(local_axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(local_axes) * size, size, dimension)


def gather_slices(x: jax.Array, local_axes: AxisName, *, dimension: int = 0) -> jax.Array:
    """Gather the slices that the devices hold along `dimension` to the whole array.

    Args:
      x: this device's slice.
      local_axes: axis inside the replica, or several, outermost first.
      dimension: dimension along which the slices are joined.

    Returns:
      The array, equal (and typed as equal) over `local_axes`.

    Communication: one all-gather of the whole array over each of `local_axes` of more than one
      device.
    """
    for name in reversed(axis_names(local_axes)):
        if axis_size(name) == 1:
            x = sum_over(x, name)
            continue
        to = "invarying" if checks_varying(name) else "varying"
        x = lax.all_gather(x, name, axis=dimension, tiled=True, to=to)
    return x


def exchange_in_slices(
    flat: jax.Array,
    local_axis_name: AxisName | None,
    exchange: Callable[[jax.Array], Any],
) -> Any:
    """Return `exchange(flat)`, with the work split over the devices of a replica.

    Args:
      flat: array `(n,)`, equal over `local_axis_name`.
      local_axis_name: axis inside a replica (fast network) of size L. None: no slices.
      exchange: function between replicas that acts on elements and keeps the shape of its argument;
        it may return several arrays.

    Returns:
      `(n,)`, or several, equal over `local_axis_name`.

    Communication: that of `exchange` with n/L elements (plus padding, see `shard_layout`), and one
      all-gather of n over `local_axis_name`.
    """
    if local_axis_name is None or axis_size(local_axis_name) == 1 or flat.size == 0:
        return exchange(flat)
    # Slices have the shape of shards, for which TPU compilers keep the all-gather.
    part = _local_part(flat, local_axis_name)
    with padding_scope(part.size * axis_size(local_axis_name), flat.size):
        result = exchange(part)
        return jax.tree.map(
            lambda x: gather_slices(x, local_axis_name).reshape(-1)[: flat.size], result
        )


def _as_shards(rows: jax.Array, layout: ShardLayout) -> jax.Array:
    """Return (replicas, n), each row padded with zeros at its end, as (replicas, *layout)."""
    padding = layout.rows * layout.lanes - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, padding))).reshape(rows.shape[0], *layout)


def _layout_of_row(size: int, count: int, local_axis_name: AxisName | None) -> ShardLayout:
    parts = 1 if local_axis_name is None else axis_size(local_axis_name)
    return shard_layout(size * count, count, num_parts=parts)


def _local_part(flat: jax.Array, local_axis_name: AxisName) -> jax.Array:
    """Return this device's part of `flat`, padded with zeros, in the layout of a shard."""
    count = axis_size(local_axis_name)
    layout = shard_layout(flat.size, count)
    padded = jnp.pad(flat, (0, count * layout.rows * layout.lanes - flat.size))
    parts = padded.reshape(count, *layout)
    return lax.dynamic_index_in_dim(parts, lax.axis_index(local_axis_name), keepdims=False)


def _scatter_sum(shards: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sum `(num_shards, ...)` over `axis_name`, and return this replica's shard of the sum."""
    for name in axis_names(axis_name):
        size = axis_size(name)
        stage = shards.reshape(size, -1, *shards.shape[1:])
        if size == 1:
            shards = stage[0]
            continue
        if is_between_cpu_processes(name):
            shards = ring_scatter_sum(stage, name)
            continue
        # With whole lanes and joined rows the TPU compiler keeps a true reduce-scatter.
        rows = stage.reshape(size, -1, shards.shape[-1])
        shards = _reduce_scatter(rows, name).reshape(stage.shape[1:])
    return shards[0]


def _reduce_scatter(rows: jax.Array, name: str) -> jax.Array:
    """Sum `(size, m, lanes)` over the axis, and return this device's part, `(m, lanes)`."""

    def scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, name, scatter_dimension=0, tiled=False)

    explicit = {*jax.sharding.get_abstract_mesh().explicit_axes}
    if not explicit:
        return scatter(rows)
    # jax 0.12 fails to lower it if the mesh has Explicit axes, so they are made manual. `rows` is
    # not split over them.
    mapped = jax.shard_map(
        scatter, in_specs=P(), out_specs=P(), axis_names=explicit, check_vma=tracks_types()
    )
    return mapped(rows)


def ring_scatter_sum(parts: jax.Array, axis_name: str) -> jax.Array:
    """Return this replica's part of the sum over `axis_name`, by a ring of permutations.

    It replaces jaxlib's reduce-scatter between processes on CPU (gloo's halving and doubling,
    jaxlib 0.10), which is slow on a slow link. Between 4 hosts at 200 Mbit/s that took 380 ms for
    5.4 MB, as long as a whole all-reduce, and two hosts sent a third more bytes than necessary. A
    ring took 167 ms; the minimum is 162 ms. jaxlib's all-gather and all-reduce reach the link's
    speed.

    Args:
      parts: array `(replicas, ...)`, at least float32.
      axis_name: mapped axis of R replicas, R > 1.

    Returns:
      Part i of the sum on replica i, of shape `parts[0].shape`. A part is summed on its way around
      the ring, so each part has a different, fixed order of additions.

    Communication: R - 1 collective-permutes of one part over `axis_name`: the bytes of one
      reduce-scatter.
    """
    count, me = axis_size(axis_name), lax.axis_index(axis_name)
    around = [(i, (i + 1) % count) for i in range(count)]

    def part(distance: int) -> jax.Array:
        """Return the part of the replica `distance` places before this one."""
        return lax.dynamic_index_in_dim(parts, jnp.mod(me - distance, count), keepdims=False)

    total = part(1)
    for distance in (*range(2, count), 0):
        total = permute(total, axis_name, around) + part(distance)
    return total


def scatter_mean(
    rows: jax.Array, axis_name: AxisName, local_axis_name: AxisName | None = None
) -> jax.Array:
    """Return this replica's row of the mean of `rows` over `axis_name`.

    Args:
      rows: array (replicas, n), at least float32; row i is for replica i.
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica, whose devices hold equal `rows`; each sends only its
        part of each row.

    Returns:
      `(n,)`, equal on the devices of one replica.

    Communication: one reduce-scatter of the rows, padded to a `shard_layout`, over `axis_name` (of
      the remaining part over each further axis). With L local devices each sends 1/L of it, and one
      all-gather of a row over `local_axis_name` follows. None if the axis has size 1. Between
      processes on CPU R - 1 collective-permutes of a row replace a reduce-scatter, with the same
      bytes.
    """
    count, size = rows.shape
    if count == 1:
        return sum_over(rows[0], axis_name)
    shards = _as_shards(rows, _layout_of_row(size, count, local_axis_name))
    mine = local_slice(shards, local_axis_name or (), dimension=1)
    with padding_scope(shards.size, rows.size):
        mean = gather_slices(_scatter_sum(mine, axis_name) / count, local_axis_name or ())
    return mean.reshape(-1)[:size]


LARGE_BYTES = 1 << 20  # from which a leaf is exchanged as it lies: packing would copy it


def is_scattered_alone(shape: tuple[int, ...], dtype: Any, dimension: int, count: int) -> bool:
    """Return whether a leaf is large, and its blocks lie together, on TPU in whole tiles.

    Such a leaf is scattered as it lies, in a collective of its own: packing would copy it.
    """
    if len(shape) < 2 or math.prod(shape) * jnp.dtype(dtype).itemsize < LARGE_BYTES:
        return False
    if dimension == 0 and platform() != "tpu":
        return True
    block = [n // count if d == dimension else n for d, n in enumerate(shape)]
    return not (block[-2] % _TILE[0] or block[-1] % _TILE[1])


def scatter_mean_along(x: jax.Array, axis_name: AxisName, dimension: int) -> jax.Array:
    """Return this replica's block along a dimension of the mean of `x` over `axis_name`.

    Args:
      x: a leaf, at least float32, whose dimension the number of replicas divides.
      axis_name: axis between replicas, or several.
      dimension: the dimension.

    Communication: one reduce-scatter of the leaf over `axis_name` (of the remaining part over each
      further axis). Between processes on CPU as in `scatter_mean`.
    """
    count = axis_size(axis_name)
    if count == 1:
        return sum_over(x, axis_name)
    size = x.shape[dimension] // count
    blocks = x.reshape(*x.shape[:dimension], count, size, *x.shape[dimension + 1 :])
    blocks = jnp.moveaxis(blocks, dimension, 0)
    mine = _scatter_sum(blocks.reshape(count, -1, blocks.shape[-1]), axis_name)
    return mine.reshape(blocks.shape[1:]) / count


def all_gather_rows(
    row: jax.Array,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    codec: Codec | None = None,
) -> jax.Array:
    """Return the rows of all replicas, (replicas, n), equal on all of them.

    Args:
      row: this replica's row, `(n,)`.
      axis_name: axis between replicas, or several.
      local_axis_name: axis inside a replica, whose devices hold equal rows; each sends only its
        part of the row.
      codec: format in which rows are sent between replicas; None sends them as they are.

    Communication: one all-gather of the rows, padded to a `shard_layout`, over `axis_name` (of a
      part of it over each further axis). With L local devices each sends 1/L of it, and one
      all-gather of the whole over `local_axis_name` follows. Of a codec the first has its bytes.
      None if the axis has size 1.
    """
    count, local = axis_size(axis_name), local_axis_name or ()
    if count == 1:
        return sum_over(row, axis_name)[None]
    shard = _as_shards(row[None], _layout_of_row(row.size, count, local_axis_name))[0]
    part = local_slice(shard, local)
    with padding_scope(shard.size, row.size):
        if codec is None:
            parts = gather_slices(part, axis_name)
        else:
            sent = codec.encode(part.reshape(1, -1).astype(jnp.float32))
            with codec_scope(codec, part.size):
                sent = gather_slices(sent, axis_name)
            parts = codec.decode(sent, part.size).astype(shard.dtype)
        parts = parts.reshape(count, *part.shape)
        return gather_slices(parts, local, dimension=1).reshape(count, -1)[:, : row.size]


def scatter_mean_of(
    chunk_mean: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    rows: jax.Array,
    local_axis_name: AxisName | None,
) -> tuple[jax.Array, jax.Array]:
    """Return what `chunk_mean` makes of the rows, padded to shards and split over local devices.

    Args:
      chunk_mean: function of (replicas, m), which returns the mean of this replica's row, (m,), and
        what of all rows was not sent, (replicas, m).
      rows: array (replicas, n).
      local_axis_name: axis inside a replica, whose devices hold equal rows.

    Returns:
      The mean (n,), and what was not sent, (replicas, n).

    Communication: that of `chunk_mean`; with L local devices for 1/L of each row, and all-gathers
      of a row and of all rows over `local_axis_name`.
    """
    (count, size), local = rows.shape, local_axis_name or ()
    shards = _as_shards(rows, _layout_of_row(size, count, local_axis_name))
    mine = local_slice(shards, local, dimension=1)
    with padding_scope(shards.size, rows.size):
        mean, lost = chunk_mean(mine.reshape(count, -1))
        lost = gather_slices(lost.reshape(mine.shape), local, dimension=1)
        mean = gather_slices(mean.reshape(mine.shape[1:]), local)
    return mean.reshape(-1)[:size], lost.reshape(count, -1)[:, :size]
