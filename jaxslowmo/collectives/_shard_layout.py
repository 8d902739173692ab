"""Shape of one replica's shard of a flat buffer.

The shape decides what a TPU compiler makes of a `psum_scatter`. Compiled for v5e, v6e and v5p
slices (libtpu 0.0.51), a 1-D buffer of any size becomes a full all-reduce and a slice: 1.5 times
the bytes of reduce-scatter and all-gather. What keeps a true reduce-scatter is a buffer of
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
from dataclasses import dataclass

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
