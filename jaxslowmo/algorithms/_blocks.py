"""Synchronisation works on each device's own block of every leaf.

On a pure data-parallel mesh the block is the leaf. Where leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes hands the exchange
local blocks, so that it gathers nothing over them. Leaves are packed together only with leaves that
are sharded over the same axes: others would be exchanged once per device of those axes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, PyTree
from ..collectives import all_mean, all_mean_in_slices, relative_weight, total_weight
from ..mesh import typed_specs
from ..tree import leaf_names, note_buffers, plan_buffers

Kind = Literal["leaves", "flat", "whole"]


def bucket_limits(bucket_bytes: int | None) -> tuple[int, ...] | None:
    """Limits for `plan_buffers`: one buffer per dtype for None."""
    return None if bucket_bytes is None else (bucket_bytes,)


@dataclass(frozen=True)
class BlockGroup:
    """Leaves that are sharded over the same automatic axes.

    Attributes:
      axes: those axes; empty for leaves that are whole on every device, or blocks already.
      indices: positions of the leaves in flattening order.
      specs: one per leaf.
    """

    axes: tuple[str, ...]
    indices: tuple[int, ...]
    specs: tuple[P, ...]

    def take(self, tree: PyTree) -> list[Any]:
        """The leaves of the group."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self.indices]

    def names(self, tree: PyTree) -> list[str]:
        """Names of the leaves of the group."""
        names = leaf_names(tree)
        return [names[i] for i in self.indices]

    def on_blocks(self, fn: Callable[..., Any], *args: Any, kinds: Sequence[Kind], out: Kind):
        """`fn` of the device's own blocks.

        Args:
          fn: function of the arguments.
          *args: lists of the group's leaves; flat buffers, which are split over all axes along
            their leading dimension; or values that are whole on every device.
          kinds: which of these each argument is.
          out: likewise for the result.
        """
        if not self.axes:
            return fn(*args)
        specs = {"leaves": list(self.specs), "flat": P(self.axes), "whole": P()}
        return jax.shard_map(
            fn,
            in_specs=tuple(specs[kind] for kind in kinds),
            out_specs=specs[out],
            axis_names=set(self.axes),
        )(*args)


def block_groups(tree: PyTree, param_specs: PyTree | None) -> list[BlockGroup]:
    """Group the leaves of `tree` by the automatic axes that `param_specs` shards them over.

    Without specs, by Explicit axes: their types tell.

    Raises:
      ValueError: specs that don't fit the tree, or an axis that the mesh here does not have.
    """
    count = len(jax.tree.leaves(tree))
    if param_specs is None:
        param_specs = typed_specs(tree)
    if param_specs is None:
        return [BlockGroup((), tuple(range(count)), (P(),) * count)]
    try:
        whole = jax.tree.broadcast(param_specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"`param_specs` must be a tree of PartitionSpec with the structure of the parameters, "
            f"or a prefix of it: {error}"
        ) from None
    specs = jax.tree.leaves(whole, is_leaf=_is_spec)
    members: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        members.setdefault(_automatic_axes(spec), []).append(i)
    return [
        BlockGroup(axes, tuple(indices), tuple(specs[i] for i in indices))
        for axes, indices in members.items()
    ]


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _automatic_axes(spec: P) -> tuple[str, ...]:
    """Axes in `spec` that the compiler still handles here; manual ones are blocks already."""
    entries = [e if isinstance(e, tuple) else (e,) for e in spec if e is not None]
    named = dict.fromkeys(name for entry in entries for name in entry)
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in named:
        if name not in types:
            raise ValueError(
                f"`param_specs` names axis {name!r}, which the mesh here does not have "
                f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
            )
    return tuple(sorted(name for name in named if types[name] != AxisType.Manual))


def replica_mean(
    tree: PyTree,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    param_specs: PyTree | None = None,
    weight: jax.Array | None = None,
    *,
    event: str | None = None,
) -> PyTree:
    """Mean of a tree over `axis_name`, through flat buffers, in the leaves' dtypes.

    With a weight it is the weighted mean; where all weights are 0, the tree as it is. `event` names
    what the buffers are exchanged for, to those who listen (`note_buffers`).

    Communication: one all-reduce per buffer over `axis_name`; with `local_axis_name` 1/L of each
    per device, and an all-gather over that axis; with a weight, before, one of 8 bytes.
    """
    whole: list[jax.Array] = []  # this replica's factor, and whether any replica weighs more than 0
    if weight is not None:
        total = total_weight(weight, axis_name)
        whole = [relative_weight(weight, total, axis_name), total.weight > 0]

    def mean_of_blocks(
        names: list[str], blocks: list[jax.Array], whole: list[jax.Array]
    ) -> list[jax.Array]:
        plan = plan_buffers(blocks, limits=bucket_limits(bucket_bytes))
        if event is not None:
            note_buffers(event, plan, names)
        return plan.unpack([mean_of(flat, *whole) for flat in plan.pack(blocks)])

    def mean_of(
        flat: jax.Array, factor: jax.Array | None = None, anyone: jax.Array | None = None
    ) -> jax.Array:
        if local_axis_name is None:
            mean = all_mean(flat, axis_name, factor=factor)
        else:
            mean = all_mean_in_slices(flat, axis_name, local_axis_name, factor=factor)
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    leaves, treedef = jax.tree.flatten(tree)
    for group in block_groups(tree, param_specs):
        means = group.on_blocks(
            functools.partial(mean_of_blocks, group.names(tree)),
            group.take(tree),
            whole,
            kinds=("leaves", "whole"),
            out="leaves",
        )
        for i, mean in zip(group.indices, means, strict=True):
            leaves[i] = mean
    return treedef.unflatten(leaves)
