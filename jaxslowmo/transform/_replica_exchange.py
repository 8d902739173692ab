"""What an exchange between replicas is over, and which blocks of leaves each device exchanges.

On a pure data-parallel mesh the block is the leaf. Where leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes hands the exchange
local blocks, so that it gathers nothing over them. Leaves are packed together only with leaves that
are sharded over the same axes: others would be exchanged once per device of those axes.
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
from ..mesh import axis_names, specs_of_leaves


@dataclass(frozen=True)
class Exchange:
    """Over which axes trees are exchanged, in which pieces, and in which form.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica. None: leaves are whole there, or their types tell (Explicit axes).
      bucket_bytes: at which size a flat buffer closes; None: one buffer per dtype.
      codec: the form in which buffers travel that it narrows; None: as they are.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None

    def with_specs(self, param_specs: PyTree) -> "Exchange":
        """The same for leaves of which the layout is known; specs that were given stay."""
        if self.param_specs is not None:
            return self
        return dataclasses.replace(self, param_specs=param_specs)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Before anything is traced: a misspelt name is found at trace time, a wrong type here.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def check_are_specs(owner: str, param_specs: PyTree | None) -> list[P]:
    """The leaves of a tree of specs; raise `ValueError` where it holds something else."""
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
    """The `Exchange` of these arguments.

    Raises:
      ValueError: axes that are no names, specs that are none or of stacked leaves, a negative
        size, or a codec that is none.
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
      axis_sizes: those axes; empty for leaves that are whole on every device, or blocks already.
      indices: positions of the leaves in flattening order.
      specs: one per leaf.
      shapes: of the leaves.
    """

    axis_sizes: Mapping[str, int]
    indices: tuple[int, ...]
    specs: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """Devices that hold different blocks."""
        return math.prod(self.axis_sizes.values())

    def blocks(self) -> list[list[Slices]]:
        """For each device along the group's axes, in order: which part it holds of each leaf."""
        # Row-major over the axes, as `PartitionSpec((a, b))` deals a dimension out.
        found = []
        for index in np.ndindex(*self.axis_sizes.values()):
            where = dict(zip(self.axis_sizes, index, strict=True))
            leaves = zip(self.shapes, self.specs, strict=True)
            found.append([self._part(shape, spec, where) for shape, spec in leaves])
        return found

    def _part(self, shape: tuple[int, ...], spec: P, where: Mapping[str, int]) -> Slices:
        slices = []
        for size, entry in zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True):
            # Manual axes do not count: what is seen here is a block along them already.
            index, count = 0, 1
            for name in axis_names(entry or ()):
                if name in where:
                    index = index * self.axis_sizes[name] + where[name]
                    count *= self.axis_sizes[name]
            step = size // count
            slices.append(slice(index * step, (index + 1) * step))
        return tuple(slices)

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one device's blocks; all have the same."""
        first = dict.fromkeys(self.axis_sizes, 0)
        return [
            tuple(part.stop for part in self._part(shape, spec, first))
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        ]


def block_groups(tree: PyTree, param_specs: PyTree | None) -> list[BlockGroup]:
    """Group the leaves of `tree` by the automatic axes that `param_specs` shards them over.

    Raises:
      ValueError: specs that don't fit the tree, or an axis that the mesh here does not have.
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
    # In the order of first appearance, which is part of the layout of sharded states.
    members: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        members.setdefault(_automatic_axes(spec, mesh), []).append(i)
    return [
        BlockGroup(
            {name: mesh.shape[name] for name in axes},
            tuple(indices),
            tuple(specs[i] for i in indices),
            tuple(shapes[i] for i in indices),
        )
        for axes, indices in members.items()
    ]


def _automatic_axes(spec: P, mesh: Any) -> tuple[str, ...]:
    """Axes in `spec` that the compiler still handles here; manual ones are blocks already."""
    named = dict.fromkeys(name for entry in spec for name in axis_names(entry or ()))
    if not named:
        return ()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in named:
        if name not in types:
            raise ValueError(
                f"`param_specs` names axis {name!r}, which the mesh here does not have "
                f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
            )
    # Sorted: P("a", "b") and P("b", "a") split leaves over the same devices.
    return tuple(sorted(name for name in named if types[name] != AxisType.Manual))
