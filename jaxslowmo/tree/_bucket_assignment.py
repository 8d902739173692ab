"""Assignment of leaves to buckets by size, dtype and label, as torch's reducer does."""

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._support.checks import as_int

MIB = 2**20
# Leaves are cut at multiples of this many elements, which is a whole number of vector registers.
_CUT = 1024


class BucketPiece(NamedTuple):
    """A piece of one leaf: its elements `start` to `stop` in row-major order."""

    label: int
    start: int
    stop: int


class _Bucket:
    """A bucket with the members that it has so far."""

    def __init__(self) -> None:
        self.pieces: list[BucketPiece] = []
        self.size_bytes = 0


class _OpenBuckets:
    """The open bucket of one dtype, and its position in the list of limits."""

    def __init__(self, itemsize: int, limits: Sequence[int]) -> None:
        self.bucket = _Bucket()
        self._itemsize, self._limits, self._position = itemsize, limits, 0

    @property
    def limit(self) -> int:
        return self._limits[self._position]

    def room(self) -> int:
        """Return how many elements reach the limit, rounded up to a place where leaves are cut."""
        elements = math.ceil((self.limit - self.bucket.size_bytes) / self._itemsize)
        return max(_CUT, math.ceil(elements / _CUT) * _CUT)

    def add(self, piece: BucketPiece) -> tuple[_Bucket, int] | None:
        """Add a piece; return the bucket and its limit if that closes the bucket."""
        bucket, limit = self.bucket, self.limit
        bucket.pieces.append(piece)
        bucket.size_bytes += (piece.stop - piece.start) * self._itemsize
        if bucket.size_bytes < limit:
            return None
        self.bucket = _Bucket()
        self._position = min(self._position + 1, len(self._limits) - 1)
        return bucket, limit


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
    limits = _checked_limits(limits)
    alone = None if alone_bytes is None else as_int(alone_bytes, 0)
    if alone_bytes is not None and alone is None:
        raise ValueError(
            f"`alone_bytes` is a size in bytes and must be an int >= 0, got {alone_bytes!r}."
        )
    if alone is not None and split_large:
        raise ValueError(
            "`alone_bytes` keeps large leaves whole, `split_large` cuts them: give one."
        )
    labels = _check_labels(leaves, indices, expect_sparse)

    closed: list[tuple[_Bucket, int]] = []
    open_buckets: dict[np.dtype, _OpenBuckets] = {}
    for label, leaf in zip(labels, leaves, strict=True):
        dtype, size = jnp.dtype(leaf.dtype), math.prod(leaf.shape)
        is_sparse = bool(expect_sparse and expect_sparse[label])
        if is_sparse or (alone is not None and size * dtype.itemsize >= alone):
            bucket = _Bucket()
            bucket.pieces.append(BucketPiece(label, 0, size))
            bucket.size_bytes = size * dtype.itemsize
            closed.append((bucket, 0 if is_sparse else alone or 0))
            continue
        growing = open_buckets.setdefault(dtype, _OpenBuckets(dtype.itemsize, limits))
        start = 0
        while start < size or size == 0:
            cut = split_large and 0 < growing.limit < size * dtype.itemsize
            stop = min(size, start + growing.room()) if cut else size
            done = growing.add(BucketPiece(label, start, stop))
            closed += [done] if done else []
            start = stop
            if size == 0:
                break
    closed += [(g.bucket, g.limit) for g in open_buckets.values() if g.bucket.pieces]
    if indices is None:
        closed.sort(key=lambda item: min(item[0].pieces))
    if max_buckets is not None:
        dtypes = {label: jnp.dtype(x.dtype) for label, x in zip(labels, leaves, strict=True)}
        closed = _merge(closed, max_buckets, dtypes, expect_sparse)
    groups: list[list[Any]] = [bucket.pieces for bucket, _ in closed]
    if not split_large:
        groups = [[piece.label for piece in group] for group in groups]
    return groups, [limit for _, limit in closed]


def check_explicit_buckets(leaves: Sequence[Any], buckets: Sequence[Sequence[int]]) -> None:
    """Raise `ValueError` unless `buckets` hold every leaf once, and one dtype each."""
    if any(not bucket for bucket in buckets):
        raise ValueError(f"`buckets` must not hold an empty bucket, got {list(buckets)}.")
    members = sorted(i for bucket in buckets for i in bucket)
    if members != list(range(len(leaves))):
        missing = sorted(set(range(len(leaves))) - set(members))
        twice = sorted({i for i in members if members.count(i) > 1})
        unknown = sorted(set(members) - set(range(len(leaves))))
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


def _merge(
    closed: list[tuple[_Bucket, int]],
    max_buckets: int,
    dtypes: dict[int, np.dtype],
    expect_sparse: Sequence[bool] | None,
) -> list[tuple[_Bucket, int]]:
    number = as_int(max_buckets, 1)
    if number is None:
        raise ValueError(f"`max_buckets` must be an int >= 1, got {max_buckets!r}.")

    def kind(bucket: _Bucket) -> Any:
        label = bucket.pieces[0].label
        return ("sparse", label) if expect_sparse and expect_sparse[label] else dtypes[label]

    least = len({kind(bucket) for bucket, _ in closed})
    if least > number:
        raise ValueError(
            f"`max_buckets` must be at least {least} here, one for each dtype and each sparse "
            f"leaf, got {number}."
        )
    # Linked lists of neighbours of one kind; a merged bucket has the position of the first.
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    last: dict[Any, int] = {}
    for i, (bucket, _) in enumerate(closed):
        group = kind(bucket)
        if group in last:
            before[i], after[last[group]] = last[group], i
        last[group] = i
    left = dict(enumerate(closed))

    def pair(j: int) -> tuple[int, int]:
        """Return the total size of two neighbours, and the position of the first."""
        return left[j][0].size_bytes + left[after[j]][0].size_bytes, j

    # Outdated pairs stay in the heap; their size differs from the present one. (A pair whose size
    # did not change is in the heap twice, which does no harm.)
    pairs = [pair(j) for j in after]
    heapq.heapify(pairs)
    while len(left) > max_buckets:
        size, j = heapq.heappop(pairs)
        if j not in after or pair(j)[0] != size:
            continue
        i = after.pop(j)
        (bucket, limit), (joined, other) = left[j], left.pop(i)
        bucket.pieces += joined.pieces
        bucket.size_bytes = size
        left[j] = bucket, max(limit, other)
        if i in after:
            after[j] = after.pop(i)
            before[after[j]] = j
            heapq.heappush(pairs, pair(j))
        if j in before:
            heapq.heappush(pairs, pair(before[j]))
    return list(left.values())


def _checked_limits(limits: Sequence[int]) -> tuple[int, ...]:
    """Return `limits` as plain ints; raise `ValueError` for other values or an empty sequence."""
    if not limits:
        raise ValueError("`limits` must hold at least one size in bytes, got none.")
    sizes = [as_int(size, 0) for size in limits]
    valid = tuple(size for size in sizes if size is not None)
    if len(valid) < len(sizes):
        raise ValueError(
            f"`limits` are sizes in bytes and must be ints >= 0, got {list(limits)!r}."
        )
    return valid


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
