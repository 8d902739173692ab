"""Static plan between the leaves of a tree and a few flat buffers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._typing import PyTree
from ._buckets import assign_buckets


@dataclass(frozen=True)
class Buffer:
    """One flat buffer: which leaves it holds, in which order, in which dtype."""

    dtype: np.dtype
    leaves: tuple[int, ...]  # positions in flattening order
    num_elements: int


@dataclass(frozen=True)
class BufferPlan:
    """How a tree is packed into flat buffers and taken apart again. Static: shapes only."""

    buffers: tuple[Buffer, ...]
    shapes: tuple[tuple[int, ...], ...]  # per leaf
    treedef: Any  # of the planned tree

    def pack(self, tree: PyTree) -> list[jax.Array]:
        """One 1-D array per buffer, in the buffer's dtype."""
        leaves = self.treedef.flatten_up_to(tree)
        return [
            jnp.concatenate([leaves[i].reshape(-1).astype(b.dtype) for i in b.leaves])
            for b in self.buffers
        ]

    def unpack(self, packed: Sequence[Any]) -> PyTree:
        """The tree whose leaves lie in `packed` (longer buffers: padding is dropped)."""
        leaves: list[Any] = [None] * len(self.shapes)
        for buffer, flat in zip(self.buffers, packed, strict=True):
            start = 0
            for i in buffer.leaves:
                size = math.prod(self.shapes[i])
                leaves[i] = flat[start : start + size].reshape(self.shapes[i])
                start += size
        return self.treedef.unflatten(leaves)


def plan_buffers(
    tree: PyTree,
    *,
    limits: Sequence[int] | None = None,
    reverse: bool = False,
    dtype_of: Callable[[np.dtype], np.dtype] = np.dtype,
) -> BufferPlan:
    """Plan flat buffers for `tree`.

    Args:
      tree: arrays or `ShapeDtypeStruct`s.
      limits: bucket limits in bytes as in `assign_buckets`; None is one buffer per dtype.
      reverse: visit the leaves last first, the order in which a backward pass finishes them.
      dtype_of: buffer dtype of a leaf dtype; default the leaf's own.

    Returns:
      A `BufferPlan`; leaves without elements stay in it, with 0 bytes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    order = list(range(len(leaves)))[:: -1 if reverse else 1]
    wire = [jax.ShapeDtypeStruct(leaves[i].shape, dtype_of(leaves[i].dtype)) for i in order]
    total = sum(math.prod(w.shape) * w.dtype.itemsize for w in wire)
    # A limit that no buffer reaches leaves one buffer per dtype.
    groups, _ = assign_buckets(wire, limits or (total + 1,), indices=order)
    buffers = tuple(
        Buffer(
            dtype=jnp.dtype(dtype_of(leaves[group[0]].dtype)),
            leaves=tuple(group),
            num_elements=sum(math.prod(leaves[i].shape) for i in group),
        )
        for group in groups
    )
    return BufferPlan(buffers, tuple(leaf.shape for leaf in leaves), treedef)
