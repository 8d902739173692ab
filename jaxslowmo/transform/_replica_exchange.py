"""The axes of an exchange between replicas, and the blocks of leaves that each device exchanges.

On a pure data-parallel mesh a block is a whole leaf. If leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes passes local blocks
to the exchange, so that it gathers nothing over them. Leaves are packed together only with leaves
that are sharded over the same axes: others would be exchanged once per device of those axes.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._support.checks import checked_int
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec
from ..mesh import axis_names, axis_size, is_bound, only_over, specs_of_leaves


@dataclass(frozen=True)
class Exchange:
    """The axes over which trees are exchanged, and the form in which they are sent.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the L devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica. None: leaves are whole there, or their types have the layout (Explicit axes).
      bucket_bytes: size in bytes at which a flat buffer is closed; None: one buffer per dtype.
      codec: encoding of buffers that are wider than its dtype; None: none.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None

    def with_specs(self, param_specs: PyTree) -> "Exchange":
        """Return this exchange for leaves with these layouts, unless it has `param_specs`."""
        if self.param_specs is not None:
            return self
        return dataclasses.replace(self, param_specs=param_specs)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Called before tracing. Whether the axes are bound is checked at trace time.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def check_are_specs(owner: str, param_specs: PyTree | None) -> list[P]:
    """Return the leaves of a tree of specs; raise `ValueError` if it has leaves of other types."""
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, P))
    if wrong := [x for x in specs if not isinstance(x, P)]:
        raise ValueError(
            f"{owner}: `param_specs` must be a tree of PartitionSpec, got a leaf of type "
            f"{type(wrong[0]).__name__}."
        )
    return specs


def checked_bytes(owner: str, argument: str, size: object) -> int:
    """Return a size in bytes as an int; raise `ValueError` unless it is an integer >= 0."""
    return checked_int(f"{owner}: `{argument}` is a size in bytes and", size, 0)


def checked_exchange(
    owner: str,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> Exchange:
    """Return the `Exchange` of these arguments, which are checked.

    Raises:
      ValueError: axes that are no names, specs that are no `PartitionSpec`s or name the replica
        axis, a negative size, or a codec that is no `Codec`.
    """
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None:
        bucket_bytes = checked_bytes(owner, "bucket_bytes", bucket_bytes)
    specs = check_are_specs(owner, param_specs)
    replicas = set(axis_names(axis_name))
    if stacked := [x for x in specs if replicas & {n for e in x for n in axis_names(e or ())}]:
        raise ValueError(
            f"{owner}: `param_specs` are of one copy of the parameters and must not name the axis "
            f"of the replicas, {axis_name!r}, got {stacked[0]}. Off stacked leaves they are read "
            "as `P(*leaf.sharding.spec[1:])`."
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            f"{owner}: `codec` must be None or one of js.codecs, such as js.codecs.bfloat16() or "
            f"js.codecs.float16(error_feedback=True), got {codec!r}."
        )
    return Exchange(axis_name, local_axis_name, param_specs, bucket_bytes, codec)


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class BlockGroup:
    """Leaves that are sharded over the same automatic axes.

    Attributes:
      axis_sizes: sizes of those axes by name; empty for leaves that are whole on every device, or
        are local blocks already.
      indices: positions of the leaves in flattening order.
      specs: a spec for each leaf, over those axes.
      shapes: shapes of the leaves.
    """

    axis_sizes: Mapping[str, int]
    indices: tuple[int, ...]
    specs: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """The number of devices that hold different blocks."""
        return math.prod(self.axis_sizes.values())

    def blocks(self) -> list[list[Slices]]:
        """Return, for each device along the group's axes, the slices of each leaf that it holds."""
        # Row-major over the axes, as `PartitionSpec((a, b))` splits a dimension.
        slices = []
        for index in np.ndindex(*self.axis_sizes.values()):
            where = dict(zip(self.axis_sizes, index, strict=True))
            leaves = zip(self.shapes, self.specs, strict=True)
            slices.append([self._part(shape, spec, where) for shape, spec in leaves])
        return slices

    def _part(self, shape: tuple[int, ...], spec: P, where: Mapping[str, int]) -> Slices:
        slices = []
        for size, entry in zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True):
            index, count = 0, 1
            for name in axis_names(entry or ()):
                index = index * self.axis_sizes[name] + where[name]
                count *= self.axis_sizes[name]
            step = size // count
            slices.append(slice(index * step, (index + 1) * step))
        return tuple(slices)

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of one device's blocks, which are equal on all devices."""
        first = dict.fromkeys(self.axis_sizes, 0)
        return [
            tuple(part.stop for part in self._part(shape, spec, first))
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        ]


def block_groups(tree: PyTree, param_specs: PyTree | None) -> list[BlockGroup]:
    """Group the leaves of `tree` by the automatic axes that `param_specs` shards them over.

    Raises:
      ValueError: specs that do not fit the tree, or an axis that the context's mesh does not have.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    # One spec may stand for a whole subtree, as in jit and shard_map.
    try:
        specs = specs_of_leaves(param_specs, tree)
    except ValueError as error:
        raise ValueError(
            "`param_specs` must be a tree of PartitionSpec with the structure of the parameters, "
            f"or a prefix of it: {error}"
        ) from None
    mesh = jax.sharding.get_abstract_mesh()
    specs = [_automatic(spec, mesh) for spec in specs]
    # Groups keep the order of first appearance, which is part of the layout of sharded states.
    members: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        # Sorted: P("a", "b") and P("b", "a") split leaves over the same devices.
        over = tuple(sorted({name for entry in spec for name in axis_names(entry or ())}))
        members.setdefault(over, []).append(i)
    return [
        BlockGroup(
            {name: mesh.shape[name] for name in axes},
            tuple(indices),
            tuple(specs[i] for i in indices),
            tuple(shapes[i] for i in indices),
        )
        for axes, indices in members.items()
    ]


def _automatic(spec: P, mesh: Any) -> P:
    """Return `spec` over the automatic axes that split a leaf: it is a block along manual ones."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    splits = set()
    for name in {name for entry in spec for name in axis_names(entry or ())}:
        if name not in types and not (is_bound(name) and axis_size(name) == 1):
            raise ValueError(
                f"`param_specs` names axis {name!r}, which the mesh here does not have "
                f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
            )
        kind = types.get(name, AxisType.Manual)
        # The type of an array names an Explicit axis also where its size is 1.
        if kind == AxisType.Explicit or (kind == AxisType.Auto and mesh.shape[name] > 1):
            splits.add(name)
    return only_over(spec, frozenset(splits))
