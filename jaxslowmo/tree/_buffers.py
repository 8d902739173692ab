"""Static plan between the leaves of a tree and a few flat buffers, and who is told of it."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.types import PyTree
from ._bucket_assignment import BucketPiece, assign_buckets, check_explicit_buckets
from ._leaves import cast, reshaped


@dataclass(frozen=True)
class Buffer:
    """One flat buffer: which parts of which leaves it holds, in which order, in which dtype."""

    dtype: np.dtype
    pieces: tuple[BucketPiece, ...]  # labels are positions in flattening order

    @property
    def leaves(self) -> tuple[int, ...]:
        """Positions of the leaves in flattening order."""
        return tuple(piece.label for piece in self.pieces)

    @property
    def num_elements(self) -> int:
        """Length of the buffer."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class BufferPlan:
    """How a tree is packed into flat buffers and taken apart again. Static: shapes only."""

    buffers: tuple[Buffer, ...]
    shapes: tuple[tuple[int, ...], ...]  # per leaf
    treedef: Any  # of the planned tree

    def pack(self, tree: PyTree) -> list[jax.Array]:
        """One 1-D array per buffer, in the buffer's dtype."""
        return _packed(self, self.treedef.flatten_up_to(tree))

    def unpack(self, packed: Sequence[Any]) -> PyTree:
        """The tree whose leaves lie in `packed` (longer buffers: padding is dropped)."""
        # NumPy arrays stay on the host.
        traced = any(isinstance(flat, jax.Array) for flat in packed)
        return self.treedef.unflatten((_unpacked_once if traced else _unpacked)(self, list(packed)))


# Traced once for all exchanges of one kind of tree, of which a program can have several, each in a
# branch inside of others.


@functools.partial(jax.jit, static_argnums=0)
def _packed(plan: BufferPlan, leaves: list[Any]) -> list[jax.Array]:
    def part(piece: BucketPiece, dtype: np.dtype) -> Any:
        size = math.prod(plan.shapes[piece.label])
        flat = reshaped(leaves[piece.label], (size,))
        whole = piece.stop - piece.start == size
        return cast(flat if whole else flat[piece.start : piece.stop], dtype)

    return [lax.concatenate([part(piece, b.dtype) for piece in b.pieces], 0) for b in plan.buffers]


def _unpacked(plan: BufferPlan, packed: list[Any]) -> list[jax.Array]:
    parts: list[list[tuple[int, Any]]] = [[] for _ in plan.shapes]
    for buffer, flat in zip(plan.buffers, packed, strict=True):
        sizes = [piece.stop - piece.start for piece in buffer.pieces]
        for piece, part in zip(buffer.pieces, split(flat, sizes), strict=True):
            parts[piece.label].append((piece.start, part))
    return [reshaped(_joined(own), shape) for own, shape in zip(parts, plan.shapes, strict=True)]


_unpacked_once = jax.jit(_unpacked, static_argnums=0)


def _joined(parts: list[tuple[int, Any]]) -> Any:
    if len(parts) == 1:
        return parts[0][1]
    return jnp.concatenate([part for _, part in sorted(parts, key=lambda item: item[0])])


def plan_buffers(
    tree: PyTree,
    *,
    limits: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    buckets: Sequence[Sequence[int]] | None = None,
    max_buckets: int | None = None,
    alone_bytes: int | None = None,
    split_large: bool = False,
    dtype_of: Callable[[np.dtype], np.dtype] = np.dtype,
) -> BufferPlan:
    """Plan flat buffers for `tree`.

    Args:
      tree: arrays or `ShapeDtypeStruct`s.
      limits: bucket limits in bytes as in `assign_buckets`; None is one buffer per dtype, for which
        its other arguments mean nothing.
      order: in which the leaves are visited, as positions in flattening order; None is that order.
      buckets: the buffers themselves, as lists of positions, instead of limits and order.
      max_buckets: at most so many buffers, as in `assign_buckets`.
      alone_bytes: leaves of this size are buffers of their own, as in `assign_buckets`.
      split_large: cut leaves that are larger than a limit, as in `assign_buckets`.
      dtype_of: buffer dtype of a leaf dtype; default the leaf's own.

    Returns:
      A `BufferPlan`; leaves without elements stay in it, with 0 bytes.

    Raises:
      ValueError: as `assign_buckets`; `buckets` that don't hold every leaf once, or mix dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    wire = [jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype)) for leaf in leaves]
    shapes = tuple(leaf.shape for leaf in leaves)
    visited = list(range(len(leaves))) if order is None else list(order)
    if buckets is not None:
        check_explicit_buckets(wire, buckets)
        groups: list[Any] = list(buckets)
    elif limits is None:
        by_dtype: dict[Any, list[int]] = {}
        for i in visited:
            by_dtype.setdefault(wire[i].dtype, []).append(i)
        groups = list(by_dtype.values())
    else:
        groups, _ = assign_buckets(
            [wire[i] for i in visited],
            limits,
            indices=visited,
            max_buckets=max_buckets,
            alone_bytes=alone_bytes,
            split_large=split_large,
        )
    if buckets is not None or limits is None or not split_large:  # members are whole leaves
        groups = [[BucketPiece(i, 0, math.prod(shapes[i])) for i in group] for group in groups]
    buffers = tuple(Buffer(jnp.dtype(wire[g[0].label].dtype), tuple(g)) for g in groups)
    return BufferPlan(buffers, shapes, treedef)


@dataclass(frozen=True)
class BufferNote:
    """One flat buffer.

    Attributes:
      role: what it is exchanged for: `"gradients"`; of parameters `"average"`, `"slow"`, `"round"`.
      dtype: its element type, by its jax name.
      size_bytes: its size on one device.
      leaves: names of the leaves in it, in order; parts of one leaf repeat its name.
    """

    role: str
    dtype: str
    size_bytes: int
    leaves: tuple[str, ...]


# An ordered set of the plans met: a program may be traced, and a plan packed, more than once.
_Notes = dict[tuple[BufferNote, ...], None]
_listening: ContextVar[_Notes | None] = ContextVar("jaxslowmo_buffer_notes", default=None)


@contextlib.contextmanager
def noted_buffers() -> Iterator[list[BufferNote]]:
    """Collects, until its end, the buffers of all programs that are traced meanwhile.

    Yields:
      A list, filled when the context ends.
    """
    found: list[BufferNote] = []
    notes: _Notes = {}
    token = _listening.set(notes)
    try:
        yield found
    finally:
        _listening.reset(token)
        found += [note for plan in notes for note in plan]


def note_buffers(role: str, plan: BufferPlan, names: Sequence[str]) -> None:
    """At trace time: tell who listens, if anybody does, what `plan` packs."""
    notes = _listening.get()
    if notes is None:
        return
    key = tuple(
        BufferNote(
            role, buffer.dtype.name, buffer.size_bytes, tuple(names[i] for i in buffer.leaves)
        )
        for buffer in plan.buffers
    )
    notes[key] = None


_FEW = 32  # parts that the compiler may make a kernel of each


def split(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of these sizes, one behind the other; what is left at the end is dropped."""
    if not isinstance(flat, jax.Array):
        ends = itertools.accumulate(sizes)
        return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if len(sizes) > _FEW and _compiles_each_offset(flat):
        return _split_at_unknown(flat, tuple(sizes))
    return _split_at_constants(flat, sizes)


def _split_at_constants(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    rest = flat.size - sum(sizes)
    if len(sizes) == 1 and not rest:
        return [flat]
    # One equation, which becomes a slice per part when it is lowered.
    return list(lax.split(flat, (*sizes, rest) if rest else sizes))[: len(sizes)]


def _compiles_each_offset(flat: jax.Array) -> bool:
    """Whether a slice at a constant would be a kernel of its own, as in XLA's compiler for CPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    # On one device nothing is exchanged: slices of a concatenation are its operands again.
    several = bool(mesh.manual_axes) and mesh.size > 1
    return several and device is not None and device.platform == "cpu" and flat.size < 2**31


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _split_at_unknown(flat: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Parts at offsets that the compiler does not know, so that parts of one size share a kernel.

    Compiled 15 ms apiece, the slices of 250 leaves at constants would take longer than all the
    rest. A barrier is forgotten too soon (jax 0.10), and an offset that is read from an array is
    read at a constant; what a conditional returns stays an operand of each slice.
    """
    ends = itertools.accumulate(sizes)
    starts = [np.int32(end - size) for end, size in zip(ends, sizes, strict=True)]
    place = lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes)
    offsets = lax.cond(place >= 0, lambda: starts, lambda: [np.int32(0) for _ in starts])
    return [
        lax.dynamic_slice(flat, (offset,), (size,), allow_negative_indices=False)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


@_split_at_unknown.defjvp
def _parts_of_tangent(
    sizes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    # Backwards it is one concatenation; of a slice at an offset it would be a whole buffer.
    return _split_at_unknown(*primals, sizes), _split_at_constants(*tangents, sizes)
