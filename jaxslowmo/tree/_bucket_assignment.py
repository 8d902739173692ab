"""Assignment of leaves to buckets by size, dtype and label, as torch's reducer does."""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._support.checks import checked_int, checks_flags

MIB = 2**20
# Leaves are cut at multiples of this many elements, which is a whole number of vector registers.
_CUT = 1024


class BucketPiece(NamedTuple):
    """A piece of one leaf: its elements `start` to `stop` in row-major order."""

    label: int
    start: int
    stop: int


@dataclass
class _Bucket:
    """A bucket with the members that it has so far, and what closes it.

    Attributes:
      kind: its dtype, or what no other has for a sparse leaf.
      limit: size in bytes that closes it.
      position: position of that limit in the list of limits.
    """

    kind: Any
    limit: int
    position: int = 0
    pieces: list[BucketPiece] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, label: int, start: int, stop: int, itemsize: int) -> None:
        self.pieces.append(BucketPiece(label, start, stop))
        self.size_bytes += (stop - start) * itemsize


@checks_flags("assign_buckets")
def assign_buckets(
    leaves: Sequence[Any],
    limits: Sequence[int] = (MIB, 25 * MIB),
    *,
    expect_sparse: Sequence[bool] | None = None,
    indices: Sequence[int] | None = None,
    max_buckets: int | None = None,
    alone_bytes: int | None = None,
    split_large: bool = False,
) -> tuple[list[Any], list[int]]:
    """Group leaves into buckets of one dtype each, in plain Python.

    Leaves are visited in order. Each dtype has one open bucket and one position in `limits`. A leaf
    whose size makes the bucket reach the current limit is added, and closes the bucket. The
    position then moves to the next limit, and stays at the last one. The result equals that of
    torch's `_compute_bucket_assignment_by_size`.

    Args:
      leaves: arrays or anything with `shape` and `dtype`.
      limits: sizes in bytes, at least one, none negative; 0 closes a bucket after every leaf.
      expect_sparse: flags by label, True for leaves that are sent alone (sparse gradients).
      indices: label of each leaf; the default is its position. With labels the buckets have the
        order in which they closed, with unclosed ones last. Without labels they are sorted by their
        smallest label.
      max_buckets: largest number of buckets; the two neighbours of one dtype with the smallest
        total size are merged, as often as needed.
      alone_bytes: size in bytes from which a leaf has its own bucket, which needs no copy; the open
        bucket stays open. None: such a leaf is added to the open bucket, as in torch.
      split_large: cut a leaf that is larger than the current limit, so that each part closes its
        bucket; the next bucket starts with the rest.

    Returns:
      `(buckets, bucket_limits)`: the labels of each bucket, and the limit in bytes that closed it
      (0 for a sparse leaf, `alone_bytes` for a large one). With `split_large` the members are
      `BucketPiece(label, start, stop)`.

    Raises:
      ValueError: no limits, a negative size, labels that don't fit the leaves, `alone_bytes` with
        `split_large`, or `max_buckets` below 1 or below the number of dtypes and sparse leaves,
        which never share a bucket.

    Example:
      >>> assign_buckets([np.zeros(4, np.float32)] * 3, limits=(16, 64))
      ([[0], [1, 2]], [16, 64])

    Communication: none.

    Source: torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp`.
    """
    if not limits:
        raise ValueError("`limits` must hold at least one size in bytes, got none.")
    each = f"`limits` are sizes in bytes, got {list(limits)!r}: each"
    limits = [checked_int(each, size, 0) for size in limits]
    alone = math.inf
    if alone_bytes is not None:
        alone = checked_int("`alone_bytes` is a size in bytes and", alone_bytes, 0)
        if split_large:
            raise ValueError(
                "`alone_bytes` keeps large leaves whole, `split_large` cuts them: give one."
            )
    labels = _check_labels(leaves, indices, expect_sparse)

    closed: list[_Bucket] = []
    open_buckets: dict[np.dtype, _Bucket] = {}
    for label, leaf in zip(labels, leaves, strict=True):
        dtype, size = jnp.dtype(leaf.dtype), math.prod(leaf.shape)
        itemsize = dtype.itemsize
        is_sparse = bool(expect_sparse and expect_sparse[label])
        if is_sparse or size * itemsize >= alone:
            own = _Bucket(("sparse", label), 0) if is_sparse else _Bucket(dtype, int(alone))
            own.add(label, 0, size, itemsize)
            closed.append(own)
            continue
        start, is_placed = 0, False
        while not is_placed:
            growing, stop = open_buckets.setdefault(dtype, _Bucket(dtype, limits[0])), size
            if split_large and 0 < growing.limit < size * itemsize:
                # What reaches the limit, rounded up to a place where leaves are cut.
                cuts = math.ceil((growing.limit - growing.size_bytes) / (itemsize * _CUT))
                stop = min(size, start + max(1, cuts) * _CUT)
            growing.add(label, start, stop, itemsize)
            if growing.size_bytes >= growing.limit:
                closed.append(growing)
                position = min(growing.position + 1, len(limits) - 1)
                open_buckets[dtype] = _Bucket(dtype, limits[position], position)
            start, is_placed = stop, stop == size
    closed += [bucket for bucket in open_buckets.values() if bucket.pieces]
    if indices is None:
        closed.sort(key=lambda bucket: min(bucket.pieces))
    if max_buckets is not None:
        closed = _merge(closed, checked_int("`max_buckets`", max_buckets, 1))
    groups: list[list[Any]] = [bucket.pieces for bucket in closed]
    if not split_large:
        groups = [[piece.label for piece in group] for group in groups]
    return groups, [bucket.limit for bucket in closed]


def check_explicit_buckets(leaves: Sequence[Any], buckets: Sequence[Sequence[int]]) -> None:
    """Raise `ValueError` unless `buckets` hold every leaf once, and one dtype each."""
    if any(not bucket for bucket in buckets):
        raise ValueError(f"`buckets` must not hold an empty bucket, got {list(buckets)}.")
    times, positions = Counter(i for bucket in buckets for i in bucket), range(len(leaves))
    if times != Counter(positions):
        missing = [i for i in positions if i not in times]
        twice = sorted(i for i in times if times[i] > 1)
        unknown = sorted(i for i in times if i not in positions)
        raise ValueError(
            f"`buckets` must hold every one of the {len(leaves)} leaves once: missing {missing}, "
            f"more than once {twice}, unknown {unknown}."
        )
    for bucket in buckets:
        dtypes = {jnp.dtype(leaves[i].dtype).name for i in bucket}
        if len(dtypes) > 1:
            raise ValueError(
                f"`buckets`: all leaves of a bucket must have one dtype, got {sorted(dtypes)} in "
                f"{list(bucket)}."
            )


def _merge(closed: list[_Bucket], most: int) -> list[_Bucket]:
    places: dict[Any, list[int]] = {}
    for i, bucket in enumerate(closed):
        places.setdefault(bucket.kind, []).append(i)
    if len(places) > most:
        raise ValueError(
            f"`max_buckets` must be at least {len(places)} here, one for each dtype and each "
            f"sparse leaf, got {most}."
        )
    # The next one of each kind; a merged bucket has the position of the first.
    after = dict(pair for of_kind in places.values() for pair in itertools.pairwise(of_kind))
    left = dict(enumerate(closed))

    def pair(j: int) -> tuple[int, int]:
        """Return the total size of two neighbours, and the position of the first."""
        return left[j].size_bytes + left[after[j]].size_bytes, j

    # Sizes in the heap may be outdated: buckets only grow, so these pairs are found too early.
    pairs = [pair(j) for j in after]
    heapq.heapify(pairs)
    while len(left) > most:
        size, j = heapq.heappop(pairs)
        if j in after and pair(j)[0] == size:
            i = after.pop(j)
            bucket, other = left[j], left.pop(i)
            bucket.pieces += other.pieces
            bucket.size_bytes, bucket.limit = size, max(bucket.limit, other.limit)
            if i in after:
                after[j] = after.pop(i)
        if j in after:
            heapq.heappush(pairs, pair(j))
    return list(left.values())


def _check_labels(
    leaves: Sequence[Any], indices: Sequence[int] | None, expect_sparse: Sequence[bool] | None
) -> list[int]:
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
    return labels
