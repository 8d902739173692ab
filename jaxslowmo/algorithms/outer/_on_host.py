"""Sharded anchors on the host: arrays `(replicas, rows, lanes)` of a mesh that may be gone."""

from typing import Any

import jax
import numpy as np

from ..._support.types import AxisName, PyTree
from ...collectives import ShardLayout, shard_layout
from ...transform import StatePlacement, TreePacking
from ...tree import BufferPlan

_MOST_PARTS = 257  # devices of a replica, where their number is not known


def join_shards(
    shards: tuple[np.ndarray, ...],
    packing: TreePacking,
    old: StatePlacement,
    local_axis_name: AxisName | None,
) -> PyTree:
    """The whole tree that the shards are of.

    Args:
      shards: stacked, in the order of the buffers.
      packing: of the tree, on `old`.
      old: where the shards come from.
      local_axis_name: as the transform has it.

    Returns:
      A tree like the parameters, in at least float32.

    Raises:
      ValueError: shards of other shapes than parameters and placement ask for.
    """
    leaves: list[Any] = [None] * packing.treedef.num_leaves
    # Only the padding at the end of a buffer depends on the devices of a replica.
    parts = [old.size(local_axis_name)] if old.is_certain else range(1, _MOST_PARTS)
    for first, group, plan in packing.numbered():
        held, count = shards[first : first + len(plan.buffers)], group.num_blocks
        wanted = [
            [(old.replicas, count * s.rows, s.lanes) for s in _layouts(plan, old, n)] for n in parts
        ]
        # Shards of another run would be cut into nonsense without a word.
        if [x.shape for x in held] not in wanted:
            raise ValueError(f"shards of {[x.shape for x in held]}, and not of {wanted[0]}")
        dtypes = {i: buffer.dtype for buffer in plan.buffers for i in buffer.leaves}
        for place, (i, shape) in enumerate(zip(group.indices, group.shapes, strict=True)):
            leaves[i] = np.empty(shape, dtypes[place])
        for device, block in enumerate(group.blocks()):
            # Rows lie by device of the group, then by replica; a buffer runs over the replicas.
            flats = [x.reshape(old.replicas, count, -1)[:, device].reshape(-1) for x in held]
            for leaf, where, part in zip(group.indices, block, plan.unpack(flats), strict=True):
                leaves[leaf][where] = part
    if more := len(shards) - len(packing.buffers()):
        raise ValueError(f"{more} shards more than the parameters need")
    return packing.treedef.unflatten(leaves)


def shard_types(
    packing: TreePacking, at: StatePlacement, local_axis_name: AxisName | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the shards that `split_shards` makes."""
    # Each device of a group has shards of its own, which lie one behind the other.
    return tuple(
        jax.ShapeDtypeStruct((at.replicas, group.num_blocks * s.rows, s.lanes), buffer.dtype)
        for group, plan in zip(packing.groups, packing.plans, strict=True)
        for s, buffer in zip(
            _layouts(plan, at, at.size(local_axis_name)), plan.buffers, strict=True
        )
    )


def split_shards(
    tree: PyTree, packing: TreePacking, new: StatePlacement, local_axis_name: AxisName | None
) -> tuple[np.ndarray, ...]:
    """The inverse of `join_shards`: stacked shards of a whole tree, zeros where they are padded."""
    leaves = jax.tree.leaves(tree)
    found: list[np.ndarray] = []
    for group, plan in zip(packing.groups, packing.plans, strict=True):
        layouts, count = _layouts(plan, new, new.size(local_axis_name)), group.num_blocks
        shards = [
            np.zeros((new.replicas, count, s.size), buffer.dtype)
            for s, buffer in zip(layouts, plan.buffers, strict=True)
        ]
        for device, block in enumerate(group.blocks()):
            parts = [leaves[j][at] for j, at in zip(group.indices, block, strict=True)]
            for shard, buffer in zip(shards, plan.buffers, strict=True):
                # Zeros at the end, where `own_shard` pads on devices.
                flat = np.zeros(new.replicas * shard.shape[-1], buffer.dtype)
                own = [parts[p.label].reshape(-1)[p.start : p.stop] for p in buffer.pieces]
                flat[: buffer.num_elements] = np.concatenate(own)
                shard[:, device] = flat.reshape(new.replicas, -1)
        found += [
            x.reshape(new.replicas, count * s.rows, s.lanes)
            for x, s in zip(shards, layouts, strict=True)
        ]
    return tuple(found)


def _layouts(plan: BufferPlan, at: StatePlacement, parts: int) -> list[ShardLayout]:
    return [shard_layout(b.num_elements, at.replicas, num_parts=parts) for b in plan.buffers]
