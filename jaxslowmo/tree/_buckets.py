"""Assignment of leaves to buckets by size, dtype and label, as torch's reducer does."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._leaves import tree_bytes

MIB = 2**20


class _OpenBucket:
    """Members collected so far for one dtype, and how far it is through the limits."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        self.size_bytes = 0
        self.limit_index = 0


def assign_buckets(
    leaves: Sequence[Any],
    limits: Sequence[int] = (MIB, 25 * MIB),
    *,
    expect_sparse: Sequence[bool] | None = None,
    indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Group leaves into buckets of one dtype each; plain Python, nothing runs on a device.

    Leaves are visited in order; each dtype has its own open bucket and its own position in
    `limits`. A bucket closes when its size reaches the current limit, the leaf that crosses it
    included; the position then moves on and stays at the last limit. Equal to torch's
    `_compute_bucket_assignment_by_size`.

    Args:
      leaves: arrays or anything with `shape` and `dtype`.
      limits: bytes, at least one, none negative; 0 closes after every leaf.
      expect_sparse: by label, True for leaves that travel alone (sparse gradients).
      indices: label of each leaf; default its position. With labels the buckets keep the order in
        which they closed, leftovers last; without, they are sorted by their smallest label.

    Returns:
      `(buckets, bucket_limits)`: the labels of each bucket, and the limit in bytes that closed it
      (0 for a sparse one).

    Raises:
      ValueError: no limits, a negative limit, or labels that don't fit the leaves.

    Example:
      >>> assign_buckets([np.zeros(4, np.float32)] * 3, limits=(16, 64))
      ([[0], [1, 2]], [16, 64])

    Source: torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp`. No communication.
    """
    if not limits:
        raise ValueError("`limits` must hold at least one size in bytes, got none.")
    if min(limits) < 0:
        raise ValueError(f"`limits` are sizes in bytes and must be >= 0, got {list(limits)}.")
    labels = list(range(len(leaves))) if indices is None else [int(i) for i in indices]
    if len(labels) != len(leaves):
        raise ValueError(
            f"`indices` must name every leaf: got {len(labels)} for {len(leaves)} leaves."
        )
    if expect_sparse and labels and max(labels) >= len(expect_sparse):
        raise ValueError(
            f"`expect_sparse` is read by label and must cover label {max(labels)}, "
            f"got {len(expect_sparse)} flags."
        )

    closed: list[tuple[list[int], int]] = []
    open_buckets: dict[np.dtype, _OpenBucket] = {}
    for label, leaf in zip(labels, leaves, strict=True):
        if expect_sparse and expect_sparse[label]:
            closed.append(([label], 0))
            continue
        bucket = open_buckets.setdefault(jnp.dtype(leaf.dtype), _OpenBucket())
        bucket.labels.append(label)
        bucket.size_bytes += tree_bytes(leaf)
        limit = limits[bucket.limit_index]
        if bucket.size_bytes >= limit:
            closed.append((bucket.labels, limit))
            bucket.labels, bucket.size_bytes = [], 0
            bucket.limit_index = min(bucket.limit_index + 1, len(limits) - 1)
    closed += [(b.labels, limits[b.limit_index]) for b in open_buckets.values() if b.labels]
    if indices is None:
        closed.sort(key=lambda item: min(item[0]))
    return [bucket for bucket, _ in closed], [limit for _, limit in closed]
