"""Static plans that pack the leaves of a tree into a few flat buffers, and notes about them."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.types import PyTree
from ._bucket_assignment import BucketPiece, assign_buckets, check_explicit_buckets
from ._leaves import cast, reshape

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


@dataclass(frozen=True)
class BufferPlan:
    """A plan that packs leaves into flat buffers and unpacks them; static, from shapes only."""

    buffers: tuple[Buffer, ...]
    shapes: tuple[tuple[int, ...], ...]  # shape of each leaf

    # With `jax.jit` these are traced once per plan. A program can have several exchanges of one
    # kind of tree, each in a branch inside other branches.

    @functools.partial(jax.jit, static_argnums=0)
    def pack(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Return one 1-D array per buffer, in the buffer's dtype."""

        def part(piece: BucketPiece, dtype: np.dtype) -> Any:
            size = math.prod(self.shapes[piece.label])
            flat = reshape(leaves[piece.label], (size,))
            whole = piece.stop - piece.start == size
            return cast(flat if whole else flat[piece.start : piece.stop], dtype)

        return [lax.concatenate([part(p, b.dtype) for p in b.pieces], 0) for b in self.buffers]

    @functools.partial(jax.jit, static_argnums=0)
    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the leaves that are in `packed`; padding at the ends is dropped."""
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
    leaves = jax.tree.leaves(tree)
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
    return BufferPlan(buffers, shapes)


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


def note_buffers(exchange: str, plan: BufferPlan, names: Sequence[str]) -> None:
    """Note the buffers of `plan` for an enclosing `noted_buffers`; called at trace time."""
    notes = _listening.get()
    if notes is None:
        return
    held = [tuple(names[i] for i in buffer.leaves) for buffer in plan.buffers]
    buffers = zip(plan.buffers, held, strict=True)
    notes[tuple(Bucket(exchange, b.size_bytes, b.dtype.name, own) for b, own in buffers)] = None


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
