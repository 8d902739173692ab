"""Synchronisation works on each device's own block of every leaf.

On a pure data-parallel mesh the block is the leaf. Where leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes hands the exchange
local blocks, so that it gathers nothing over them. Leaves are packed together only with leaves that
are sharded over the same axes: others would be exchanged once per device of those axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..mesh import axis_names, specs_of_leaves

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
