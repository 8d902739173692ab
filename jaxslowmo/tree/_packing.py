"""Packing of trees into flat buffers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._support.types import PyTree
from ._buffers import Buffer, BufferPlan, note_buffers
from ._leaves import leaf_names

Flats = list[jax.Array]  # one for each buffer
OnBuffer = Callable[[Buffer, Any], Any]
"""`fn(buffer, flat)`: called for a flat buffer."""


def _identity(buffer: Buffer, flat: Any) -> Any:
    del buffer
    return flat


@dataclass(frozen=True)
class TreePacking:
    """A plan by which trees of the same types are packed into flat buffers.

    Attributes:
      treedef: structure of the trees.
      plan: the buffers, and the leaves in them.
    """

    treedef: Any
    plan: BufferPlan

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
            note_buffers(role, self.plan, self.names)
        return self.map(fn, self.plan.pack(self.treedef.flatten_up_to(tree)))

    def map(self, fn: OnBuffer, flats: Sequence[Any]) -> list[Any]:
        """Return `fn(buffer, flat)`, an array or several, for every flat buffer.

        Communication: only that of `fn`.
        """
        return [fn(buffer, flat) for buffer, flat in zip(self.plan.buffers, flats, strict=True)]

    def unpack(self, flats: Sequence[Any]) -> PyTree:
        """Return the tree that is packed in these buffers, in their dtypes."""
        return self.treedef.unflatten(self.plan.unpack(flats))

    def map_buffers(self, fn: OnBuffer, tree: PyTree, *, role: str | None = None) -> PyTree:
        """Return `tree` with every flat buffer replaced by `fn(buffer, flat)`; see `pack`.

        Communication: only that of `fn`.
        """
        return self.unpack(self.pack(tree, fn, role=role))
