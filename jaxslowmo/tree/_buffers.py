"""Flat buffers: which leaves each holds, by torch's rule of buckets, and the packing of trees.

Plans are static: they follow from shapes and dtypes. `noted_buffers` tells reports about them.
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.checks import checked_int, checks_flags
from .._support.types import PyTree
from ._leaves import cast, leaf_names, reshape

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
    kinds = {bucket.kind for bucket in closed}
    if len(kinds) > most:
        raise ValueError(
            f"`max_buckets` must be at least {len(kinds)} here, one for each dtype and each sparse "
            f"leaf, got {most}."
        )
    closed = list(closed)
    while len(closed) > most:
        latest: dict[Any, int] = {}
        pairs = []  # two neighbours of one kind: their total size, and where they are
        for i, bucket in enumerate(closed):
            if bucket.kind in latest:
                j = latest[bucket.kind]
                pairs.append((closed[j].size_bytes + bucket.size_bytes, j, i))
            latest[bucket.kind] = i
        size, j, i = min(pairs)
        bucket, other = closed[j], closed.pop(i)
        bucket.pieces += other.pieces
        bucket.size_bytes, bucket.limit = size, max(bucket.limit, other.limit)
    return closed


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


_NO_LIMIT = 2**63  # bytes


@dataclass(frozen=True)
class Buffer:
    """A flat buffer: the parts of leaves that it holds, in order, and its dtype."""

    dtype: np.dtype
    pieces: tuple[BucketPiece, ...]  # labels are positions in flattening order

    @property
    def leaves(self) -> tuple[int, ...]:
        """The positions of the leaves in flattening order."""
        return tuple(piece.label for piece in self.pieces)

    @property
    def num_elements(self) -> int:
        """The number of elements of the buffer."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        """The size of the buffer in bytes."""
        return self.num_elements * self.dtype.itemsize


Flats = list[jax.Array]  # one for each buffer
OnBuffer = Callable[[Buffer, Any], Any]
"""`fn(buffer, flat)`: called for a flat buffer."""


def _identity(buffer: Buffer, flat: Any) -> Any:
    del buffer
    return flat


@dataclass(frozen=True)
class BufferPlan:
    """A plan by which trees of the same types are packed into flat buffers; static.

    Attributes:
      treedef: structure of the trees.
      buffers: the buffers, and the leaves in them.
      shapes: shape of each leaf.
    """

    treedef: Any
    buffers: tuple[Buffer, ...]
    shapes: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the tree's leaves."""
        return leaf_names(self.treedef.unflatten(range(self.treedef.num_leaves)))

    def pack(self, tree: PyTree, fn: OnBuffer = _identity, *, role: str | None = None) -> Flats:
        """Pack `tree` and return `fn(buffer, flat)` for every flat buffer.

        Args:
          tree: tree of the planned structure; leaves are cast to the dtypes of the buffers.
          fn: function of a buffer; by default it returns the buffer.
          role: what the buffers are exchanged for, which `note_buffers` reports; None: no report.

        Communication: only that of `fn`.
        """
        if role is not None:  # names are for reports only
            note_buffers(role, self.buffers, self.names)
        return self.map(fn, self._pack(self.treedef.flatten_up_to(tree)))

    def map(self, fn: OnBuffer, flats: Sequence[Any]) -> list[Any]:
        """Return `fn(buffer, flat)`, an array or several, for every flat buffer.

        Communication: only that of `fn`.
        """
        return [fn(buffer, flat) for buffer, flat in zip(self.buffers, flats, strict=True)]

    def unpack(self, flats: Sequence[Any]) -> PyTree:
        """Return the tree in these buffers, in their dtypes; padding at the ends is dropped."""
        return self.treedef.unflatten(self._unpack(flats))

    def map_buffers(self, fn: OnBuffer, tree: PyTree, *, role: str | None = None) -> PyTree:
        """Return `tree` with every flat buffer replaced by `fn(buffer, flat)`; see `pack`.

        Communication: only that of `fn`.
        """
        return self.unpack(self.pack(tree, fn, role=role))

    # With `jax.jit` these are traced once per plan. A program can have several exchanges of one
    # kind of tree, each in a branch inside other branches.

    @functools.partial(jax.jit, static_argnums=0)
    def _pack(self, leaves: Sequence[Any]) -> Flats:
        def part(piece: BucketPiece, dtype: np.dtype) -> Any:
            size = math.prod(self.shapes[piece.label])
            flat = reshape(leaves[piece.label], (size,))
            whole = piece.stop - piece.start == size
            return cast(flat if whole else flat[piece.start : piece.stop], dtype)

        return [lax.concatenate([part(p, b.dtype) for p in b.pieces], 0) for b in self.buffers]

    @functools.partial(jax.jit, static_argnums=0)
    def _unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        parts: list[list[jax.Array]] = [[] for _ in self.shapes]
        for buffer, flat in zip(self.buffers, packed, strict=True):
            sizes = [piece.stop - piece.start for piece in buffer.pieces]
            for piece, part in zip(buffer.pieces, split_last(flat, sizes), strict=True):
                parts[piece.label].append(part)  # those of a leaf come in their order
        leaves = zip(parts, self.shapes, strict=True)
        return [reshape(lax.concatenate(leaf, 0), shape) for leaf, shape in leaves]


def plan_buffers(
    tree: PyTree,
    *,
    limits: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    buckets: Sequence[Sequence[int]] | None = None,
    max_buckets: int | None = None,
    alone_bytes: int | None = None,
    split_large: bool = False,
) -> BufferPlan:
    """Plan flat buffers for the leaves of `tree`, in their dtypes.

    Args:
      tree: arrays or `ShapeDtypeStruct`s.
      limits: bucket limits in bytes as in `assign_buckets`. None makes one buffer per dtype.
      order: positions in flattening order, in which the leaves are visited; None is that order.
      buckets: the buffers themselves, as lists of positions, instead of limits and order.
      max_buckets: largest number of buffers, as in `assign_buckets`.
      alone_bytes: size from which a leaf has its own buffer, as in `assign_buckets`.
      split_large: cut leaves that are larger than a limit, as in `assign_buckets`.

    Returns:
      A `BufferPlan`; leaves without elements stay in it, with 0 bytes.

    Raises:
      ValueError: errors of `assign_buckets`; `buckets` that do not hold every leaf once, or that
        mix dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = tuple(leaf.shape for leaf in leaves)
    visited = list(range(len(leaves))) if order is None else list(order)
    groups: list[Any] = [] if buckets is None else list(buckets)
    if buckets is not None:
        check_explicit_buckets(leaves, buckets)
    else:
        groups, _ = assign_buckets(
            [leaves[i] for i in visited],
            (_NO_LIMIT,) if limits is None else limits,
            indices=visited,
            max_buckets=max_buckets,
            alone_bytes=alone_bytes,
            split_large=split_large,
        )
    if buckets is not None or not split_large:  # members are whole leaves
        groups = [[BucketPiece(i, 0, math.prod(shapes[i])) for i in group] for group in groups]
    buffers = tuple(Buffer(jnp.dtype(leaves[g[0].label].dtype), tuple(g)) for g in groups)
    return BufferPlan(treedef, buffers, shapes)


@dataclass(frozen=True)
class Bucket:
    """One flat buffer that is exchanged as a whole.

    Attributes:
      exchange: its purpose: `"gradients"`, or for parameters `"average"`, `"slow"` or
        `"round"`.
      size_bytes: its size on one device.
      dtype: dtype of its elements.
      leaves: names of the leaves in it, in order; parts of one leaf repeat its name.
    """

    exchange: str
    size_bytes: int
    dtype: str
    leaves: tuple[str, ...]


# An ordered set of plans: a program may be traced, and a plan packed, more than once.
_Notes = dict[tuple[Bucket, ...], None]
_listening: ContextVar[_Notes | None] = ContextVar("jaxslowmo_buffer_notes", default=None)


@contextlib.contextmanager
def noted_buffers() -> Iterator[list[Bucket]]:
    """Collect the buffers of all programs that are traced within the block.

    Yields:
      A list, filled when the block ends.
    """
    buffers: list[Bucket] = []
    notes: _Notes = {}
    token = _listening.set(notes)
    try:
        yield buffers
    finally:
        _listening.reset(token)
        buffers += [note for plan in notes for note in plan]


def note_buffers(exchange: str, buffers: Sequence[Buffer], names: Sequence[str]) -> None:
    """Note the buffers of a plan for an enclosing `noted_buffers`; called at trace time."""
    notes = _listening.get()
    if notes is not None:
        named = [(b, tuple(names[i] for i in b.leaves)) for b in buffers]
        notes[tuple(Bucket(exchange, b.size_bytes, b.dtype.name, own) for b, own in named)] = None


_FEW = 32  # up to so many parts, one kernel for each does not take long to compile


def split_last(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Split the last dimension into consecutive parts of these sizes; the rest is dropped."""
    if len(sizes) > _FEW and _compiles_each_offset(flat):
        return _split_at_unknown(flat, tuple(sizes))
    return _split_at_constants(flat, sizes)


def _split_at_constants(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    rest = flat.shape[-1] - sum(sizes)
    if len(sizes) == 1 and not rest:
        return [flat]
    # This is one equation while tracing, which is lowered to one slice per part.
    every = (*sizes, rest) if rest else sizes
    return list(lax.split(flat, every, axis=flat.ndim - 1))[: len(sizes)]


def _compiles_each_offset(flat: jax.Array) -> bool:
    """Return whether XLA compiles one kernel per slice at a constant offset, as it does on CPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    # On one device nothing is exchanged, and XLA simplifies slices of a concatenation.
    several = bool(mesh.manual_axes) and mesh.size > 1
    return several and device is not None and device.platform == "cpu" and flat.size < 2**31


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _split_at_unknown(flat: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Split at offsets that the compiler does not know, so that parts of one size share a kernel.

    A slice at a constant offset takes 15 ms to compile, so those of 250 leaves would take longer
    than the rest of a program. An optimization barrier is removed too early (jax 0.10), and an
    offset that is read from an array is read at a constant. The result of a conditional stays an
    operand of each slice.
    """
    ends = itertools.accumulate(sizes)
    starts = [np.int32(end - size) for end, size in zip(ends, sizes, strict=True)]
    place = lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes)
    offsets = lax.cond(place >= 0, lambda: starts, lambda: [np.int32(0) for _ in starts])
    return [
        lax.dynamic_slice_in_dim(flat, offset, size, flat.ndim - 1, allow_negative_indices=False)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


@_split_at_unknown.defjvp
def _parts_of_tangent(
    sizes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    # Transposed, this is one concatenation. The transpose of a dynamic slice is a whole buffer.
    return _split_at_unknown(*primals, sizes), _split_at_constants(*tangents, sizes)
