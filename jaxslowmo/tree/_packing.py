"""Packing of trees into flat buffers, of each device's blocks.

On a pure data-parallel mesh a block is a whole leaf. If leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes gives functions of
buffers the local blocks, so that nothing is gathered over them. Leaves are packed together only
with leaves that are sharded over the same axes: others would be in the buffers of each device of
those axes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree, axis_names
from .._support.varying import tracks_types
from ._buffers import Buffer, BufferPlan, note_buffers
from ._leaves import leaf_names

Kind = Literal["leaves", "flat", "whole"]
Out = Kind | tuple[Kind, ...]
Sizes = Mapping[str, int]  # of axes, by name
Flats = list[jax.Array]  # one for each buffer
OnBuffer = Callable[..., Any]
"""`fn(buffer, flat, *whole)`: called for a flat buffer; a replica's devices have equal `whole`."""


def _unchanged(buffer: Buffer, flat: Any) -> Any:
    del buffer
    return flat


# A leaf and its blocks. They are numbered row-major over the axes that split the leaf, as
# `PartitionSpec((a, b))` splits a dimension.


def to_blocks(x: Any, spec: Iterable[Any], sizes: Sizes, num_lead: int = 0) -> Any:
    """Return the blocks of a leaf, (*lead, *sizes, elements of a block), by NumPy or jax.

    Args:
      x: array (*lead, *shape).
      spec: the axes that split each dimension of the leaf, as in a `PartitionSpec`.
      sizes: sizes of these axes; their order is that of the blocks.
      num_lead: number of dimensions that the array has before those of the leaf, such as replicas.
    """
    lead, shape = x.shape[:num_lead], x.shape[num_lead:]
    local, order = _to_whole(shape, spec, sizes, num_lead)
    split = (*lead, *sizes.values(), *local)
    x = x.reshape([split[i] for i in order]).transpose([int(i) for i in np.argsort(order)])
    return x.reshape((*lead, *sizes.values(), math.prod(local)))


def from_blocks(blocks: Any, shape: Sequence[int], spec: Iterable[Any], sizes: Sizes) -> Any:
    """Return the leaf (*lead, *shape) of these blocks; the inverse of `to_blocks`."""
    lead = blocks.shape[: blocks.ndim - len(sizes) - 1]
    local, order = _to_whole(shape, spec, sizes, len(lead))
    whole = blocks.reshape((*lead, *sizes.values(), *local)).transpose(order)
    return whole.reshape((*lead, *shape))


def _to_whole(
    shape: Sequence[int], spec: Iterable[Any], sizes: Sizes, num_lead: int = 0
) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of a block, and the order in which the axes come to their dimensions."""
    entries = [axis_names(entry or ()) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    local = [
        size // math.prod(sizes[axis] for axis in entry)
        for size, entry in zip(shape, entries, strict=True)
    ]
    places = {axis: num_lead + i for i, axis in enumerate(sizes)}
    order = [*range(num_lead)]
    for dim, entry in enumerate(entries, start=num_lead + len(sizes)):
        # If an entry of the spec names several axes, the first one varies slowest.
        order += [*(places[axis] for axis in entry), dim]
    return tuple(local), order


class BufferGroup(NamedTuple):
    """Leaves that are sharded over the same automatic axes, and the buffers of a device's blocks.

    Attributes:
      first: number of the group's first buffer among the buffers of the tree.
      axis_sizes: sizes of those axes by name; empty for leaves that are whole on every device, or
        are local blocks already.
      indices: positions of the leaves in flattening order.
      specs: a spec for each leaf, over those axes.
      shapes: shapes of the leaves.
      plan: plan of the group's buffers; its shapes are those of the blocks, equal on all devices.
    """

    first: int
    axis_sizes: Sizes
    indices: tuple[int, ...]
    specs: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]
    plan: BufferPlan

    @property
    def num_blocks(self) -> int:
        """The number of devices that hold different blocks."""
        return math.prod(self.axis_sizes.values())

    def on_blocks(self, fn: Callable[..., Any], *args: Any, kinds: Sequence[Kind], out: Out) -> Any:
        """Call `fn` on each device with its blocks.

        Args:
          fn: function of the arguments.
          *args: lists of the group's leaves; flat buffers, which are split over the group's axes
            along their leading dimension; or values that are whole on every device.
          kinds: the kind of each argument.
          out: the kind of the result, or of each result.
        """
        # Map over all automatic axes, including those over which this group is not sharded.
        # Otherwise the compiler would choose layouts of buffers over these, and on CPU (jax 0.10.2,
        # 0.12.0) it aborts on a sum in half precision whose layout it chose.
        mesh = jax.sharding.get_abstract_mesh()
        automatic = set(mesh.axis_names) - set(mesh.manual_axes) if mesh.manual_axes else set()
        if not automatic:  # every array is local to this device
            return fn(*args)
        axes = tuple(self.axis_sizes)
        specs: dict[Kind, Any] = {
            "leaves": list(self.specs),
            "flat": P(axes) if axes else P(),
            "whole": P(),
        }
        return jax.shard_map(
            fn,
            in_specs=tuple(specs[kind] for kind in kinds),
            out_specs=tuple(specs[x] for x in out) if isinstance(out, tuple) else specs[out],
            axis_names=automatic,
            check_vma=tracks_types(),
        )(*args)


@dataclass(frozen=True)
class TreePacking:
    """A plan by which trees of the same types are packed into flat buffers.

    If leaves are sharded over automatic axes inside a replica, each device has buffers of its local
    blocks, and functions of buffers run on these.

    Attributes:
      treedef: structure of the trees.
      groups: groups of leaves that are sharded over the same axes, with their buffers.
    """

    treedef: Any
    groups: tuple[BufferGroup, ...]

    @classmethod
    def planned(
        cls,
        treedef: Any,
        leaves: Sequence[Any],
        specs: Sequence[P],
        sizes: Sizes,
        plan: Callable[[list[Any], Mapping[int, int]], BufferPlan],
    ) -> "TreePacking":
        """Return the packing of a tree by a plan for each group of leaves.

        Args:
          treedef: structure of the tree.
          leaves: the tree's arrays or types.
          specs: a spec for each leaf, over automatic axes inside a replica.
          sizes: sizes of these axes by name.
          plan: `plan(blocks, place)`: returns the plan for a group, where `blocks` are the types of
            one device's blocks, equal on all devices, and `place` maps the position of a leaf in
            the tree to that of its block in `blocks`.
        """
        # Groups keep the order of first appearance, which is part of the layout of sharded states.
        members: dict[tuple[str, ...], list[int]] = {}
        for i, spec in enumerate(specs):
            # Sorted: P("a", "b") and P("b", "a") split leaves over the same devices.
            axes = tuple(sorted({name for entry in spec for name in axis_names(entry or ())}))
            members.setdefault(axes, []).append(i)
        groups, first = [], 0
        for axes, indices in members.items():
            over = {name: sizes[name] for name in axes}
            held = tuple(specs[i] for i in indices), tuple(leaves[i].shape for i in indices)
            blocks = [
                jax.ShapeDtypeStruct(_to_whole(shape, spec, over)[0], leaves[i].dtype)
                for i, spec, shape in zip(indices, *held, strict=True)
            ]
            buffers = plan(blocks, {i: k for k, i in enumerate(indices)})
            groups.append(BufferGroup(first, over, tuple(indices), *held, buffers))
            first += len(buffers.buffers)
        return cls(treedef, tuple(groups))

    def buffers(self) -> list[Buffer]:
        """Return all buffers, in order."""
        return _flattened([group.plan.buffers for group in self.groups])

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the tree's leaves."""
        return leaf_names(self.treedef.unflatten(range(self.treedef.num_leaves)))

    # On devices

    def pack(self, tree: PyTree, fn: OnBuffer = _unchanged, *, role: str | None = None) -> Flats:
        """Pack `tree` and return `fn(buffer, flat)` for every flat buffer.

        Args:
          tree: tree of the planned structure; leaves are cast to the dtypes of the buffers.
          fn: function of a buffer; by default it returns the buffer.
          role: what the buffers are exchanged for, which `note_buffers` reports; None: no report.

        Communication: only that of `fn`.
        """
        return _flattened(self._from("leaves", "flat", fn, self.leaves(tree, role)))

    def map(self, fn: OnBuffer, flats: Sequence[Any], *whole: Any) -> list[Any]:
        """Return `fn(buffer, flat, *whole)`, an array or several, for every flat buffer.

        Communication: only that of `fn`.
        """
        return _flattened(self._from("flat", "flat", fn, self.by_group(flats), *whole))

    def unpack(self, flats: Sequence[Any], fn: OnBuffer = _unchanged) -> PyTree:
        """Return the tree that is packed in `fn(buffer, flat)` of these buffers, in their dtypes.

        Communication: only that of `fn`.
        """
        return self.tree(self._from("flat", "leaves", fn, self.by_group(flats)))

    def through(self, fn: OnBuffer, tree: PyTree, *whole: Any, role: str | None = None) -> PyTree:
        """Return `tree` with every flat buffer replaced by `fn(buffer, flat, *whole)`; see `pack`.

        Communication: only that of `fn`.
        """
        return self.tree(self._from("leaves", "leaves", fn, self.leaves(tree, role), *whole))

    def _from(self, kind: Kind, out: Kind, fn: OnBuffer, given: Any, *whole: Any) -> list[Any]:
        """Return `fn(buffer, flat, *whole)` for each group, from leaves or flat buffers."""

        def of_group(group: BufferGroup, given: list[Any], *whole: Any) -> list[Any]:
            flats = group.plan.pack(given) if kind == "leaves" else given
            flats = [fn(b, x, *whole) for b, x in zip(group.plan.buffers, flats, strict=True)]
            return group.plan.unpack(flats) if out == "leaves" else flats

        kinds: list[Kind] = [kind, *["whole" for _ in whole]]
        return self.each(of_group, given, *whole, kinds=kinds, out=out)

    def each(
        self, fn: Callable[..., Any], *args: Any, kinds: Sequence[Kind], out: Out
    ) -> list[Any]:
        """Call `fn(group, ...)` by `on_blocks` for each group, and return the list of results.

        Arguments are lists with an entry for each group, except those of the kind "whole".
        """
        results = []
        for i, group in enumerate(self.groups):
            own = [x if kind == "whole" else x[i] for x, kind in zip(args, kinds, strict=True)]
            of_group = functools.partial(fn, group)
            results.append(group.on_blocks(of_group, *own, kinds=kinds, out=out))
        return results

    def by_group(self, buffers: Sequence[Any]) -> list[list[Any]]:
        """Split a sequence with an entry for each buffer into a list for each group."""
        rest = iter(buffers)
        return [[next(rest) for _ in group.plan.buffers] for group in self.groups]

    def leaves(self, tree: PyTree, role: str | None) -> list[list[jax.Array]]:
        """Return the leaves of each group, and report the group's buffers under `role`."""
        # Names are for reports only, and are computed once per plan.
        if role is not None:
            for group in self.groups:
                note_buffers(role, group.plan, [self.names[i] for i in group.indices])
        leaves = self.treedef.flatten_up_to(tree)
        return [[leaves[i] for i in group.indices] for group in self.groups]

    def tree(self, by_group: Sequence[Sequence[Any]]) -> PyTree:
        """Return the tree of the leaves of all groups."""
        places = _flattened([group.indices for group in self.groups])
        leaves = dict(zip(places, _flattened(by_group), strict=True))
        return self.treedef.unflatten([leaves[i] for i in range(len(leaves))])


def _flattened(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [x for each in lists for x in each]
