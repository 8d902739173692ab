"""Shape of one replica's shard of a flat buffer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardLayout:
    """A shard is `(rows, lanes)`; a buffer over R replicas is `(R * rows, lanes)`, zero-padded."""

    rows: int
    lanes: int

    @property
    def size(self) -> int:
        """Elements of one shard, padding included."""
        return self.rows * self.lanes


def shard_layout(num_elements: int, num_shards: int, *, rows_multiple: int = 1) -> ShardLayout:
    """Layout of the shards of a buffer.

    Args:
      num_elements: elements of the buffer.
      num_shards: replicas it is split over.
      rows_multiple: rows must be a multiple of it (devices of a replica share the rows).
    """
    per_shard = max(1, math.ceil(num_elements / num_shards))
    lanes = 128 if per_shard >= 128 * 100 else 1
    rows = math.ceil(per_shard / lanes)
    return ShardLayout(math.ceil(rows / rows_multiple) * rows_multiple, lanes)
