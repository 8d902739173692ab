"""Where slow state lives: sharded over the replicas, whole on each, or each its own.

The outer step is the same for all three. A layout says how the anchor is stored, how the average
of the replicas reaches that form, and how parameters are restored from it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import AxisName, PyTree
from ..collectives import (
    ShardLayout,
    all_gather_shards,
    mean_to_shards,
    own_shard,
    shard_layout,
)
from ..mesh import axis_size
from ..tree import BufferPlan, at_least_float32, note_buffers, plan_buffers
from ._blocks import block_groups, bucket_limits, replica_mean
from ._carry import AnchorShards, Placement, replica_average, stacked


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)


@dataclass(frozen=True)
class AnchorLayout:
    """Functions on per-replica trees.

    Attributes:
      store: `store(params) -> anchor`: the anchor of given parameters; no communication.
      like_stored: `like_stored(params)`: zeros of the shapes and dtypes of that, from types alone.
      average: `average(y) -> avg`: mean of `y` over replicas, in the anchor's form.
      restore: `restore(anchor, params) -> tree`: float32 values in the shape of the parameters.
      pin: `pin(state, params) -> state`: lays arrays of the anchor's form in `state` out as the
        anchor is; no communication.
      is_sharded: whether `store` needs the replica axis, to know which shard is this replica's.
      join: `join(stacked, params, old) -> tree`: the anchor of all replicas, NumPy arrays with a
        leading replica axis on placement `old`, as one tree like the parameters.
      split: `split(tree, params, new) -> stacked`: the inverse, for placement `new`.
      is_own: whether replicas have anchors of their own, of which `join` gives the mean.
    """

    store: Callable[[PyTree], Any]
    like_stored: Callable[[PyTree], Any]
    average: Callable[[PyTree], Any]
    restore: Callable[[Any, PyTree], PyTree]
    pin: Callable[[PyTree, PyTree], PyTree] = lambda state, params: state
    is_sharded: bool = False
    join: Callable[[Any, PyTree, Placement], PyTree] = lambda anchor, params, old: jax.tree.map(
        replica_average, anchor
    )
    split: Callable[[PyTree, PyTree, Placement], Any] = lambda tree, params, new: jax.tree.map(
        lambda x: stacked(x, new), tree
    )
    is_own: bool = False


def own_anchor() -> AnchorLayout:
    """Each replica keeps its own anchor and averages nothing.

    Communication: none.
    """
    return AnchorLayout(_wide, _wide, lambda y: y, lambda anchor, params: anchor, is_own=True)


def whole_anchor(
    axis_name: AxisName,
    local_axis_name: AxisName | None,
    param_specs: PyTree | None,
    bucket_bytes: int | None,
) -> AnchorLayout:
    """Every replica keeps the whole anchor, a float32 tree like the parameters.

    Communication: `average` is one all-reduce of N bytes over `axis_name` per buffer.
    """

    def average(y: PyTree) -> PyTree:
        return replica_mean(y, axis_name, local_axis_name, bucket_bytes, param_specs, event="slow")

    return AnchorLayout(_wide, _wide, average, lambda anchor, params: anchor)


def sharded_anchor(
    axis_name: AxisName,
    local_axis_name: AxisName | None,
    param_specs: PyTree | None,
    bucket_bytes: int | None,
) -> AnchorLayout:
    """Each replica keeps 1/R of the anchor, as `(rows, lanes)` float32 shards of flat buffers.

    Leaves that are sharded over the same axes inside the replica share buffers; without
    `param_specs` all do.

    Communication: `average` is one reduce-scatter, `restore` one all-gather of N bytes over
    `axis_name` per buffer.
    """

    def plan_of(blocks: list[Any]) -> tuple[BufferPlan, list[ShardLayout]]:
        limits = bucket_limits(bucket_bytes)
        plan = plan_buffers(blocks, limits=limits, dtype_of=at_least_float32)
        shards = axis_size(axis_name)
        parts = 1 if local_axis_name is None else axis_size(local_axis_name)
        return plan, [shard_layout(b.num_elements, shards, num_parts=parts) for b in plan.buffers]

    def store_blocks(blocks: list[jax.Array]) -> tuple[jax.Array, ...]:
        plan, layouts = plan_of(blocks)
        packed = zip(plan.pack(blocks), layouts, strict=True)
        return tuple(own_shard(flat, layout, axis_name) for flat, layout in packed)

    def average_blocks(names: list[str], blocks: list[jax.Array]) -> tuple[jax.Array, ...]:
        plan, layouts = plan_of(blocks)
        note_buffers("slow", plan, names)
        packed = zip(plan.pack(blocks), layouts, strict=True)
        return tuple(
            mean_to_shards(flat, layout, axis_name, local_axis_name) for flat, layout in packed
        )

    def restore_blocks(shards: tuple[jax.Array, ...], blocks: list[jax.Array]) -> list[jax.Array]:
        plan, _ = plan_of(blocks)
        return plan.unpack(
            [
                all_gather_shards(shard, b.num_elements, axis_name, local_axis_name)
                for shard, b in zip(shards, plan.buffers, strict=True)
            ]
        )

    def zero_blocks(blocks: list[jax.Array]) -> tuple[jax.Array, ...]:
        """Zeros like the shards of `store_blocks`, without packing anything."""
        plan, layouts = plan_of(blocks)
        return tuple(
            jnp.zeros((layout.rows, layout.lanes), buffer.dtype)
            for buffer, layout in zip(plan.buffers, layouts, strict=True)
        )

    def into_shards(fn: Callable[..., Any], tree: PyTree) -> list[tuple[jax.Array, ...]]:
        """Shards of each group of leaves."""
        return [
            group.on_blocks(fn, group.take(tree), kinds=("leaves",), out="flat")
            for group in block_groups(tree, param_specs)
        ]

    def average(y: PyTree) -> tuple[jax.Array, ...]:
        shards = (
            group.on_blocks(
                functools.partial(average_blocks, group.names(y)),
                group.take(y),
                kinds=("leaves",),
                out="flat",
            )
            for group in block_groups(y, param_specs)
        )
        return tuple(shard for found in shards for shard in found)

    def by_group(params: PyTree) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        return jax.eval_shape(lambda p: into_shards(zero_blocks, p), params)

    def restore(anchor: tuple[jax.Array, ...], params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        nested = jax.tree.structure(by_group(params)).unflatten(anchor)
        for group, shards in zip(block_groups(params, param_specs), nested, strict=True):
            blocks = group.on_blocks(
                restore_blocks, shards, group.take(params), kinds=("flat", "leaves"), out="leaves"
            )
            for i, block in zip(group.indices, blocks, strict=True):
                leaves[i] = block
        return treedef.unflatten(leaves)

    def pin(state: PyTree, params: PyTree) -> PyTree:
        """Zeros that an outer optimizer makes have no layout of their own yet."""
        groups = block_groups(params, param_specs)
        group_of = {
            shard.shape: group
            for group, shards in zip(groups, by_group(params), strict=True)
            for shard in shards
        }

        def place(x: jax.Array) -> jax.Array:
            if x.shape not in group_of:
                return x
            return group_of[x.shape].on_blocks(lambda y: y, x, kinds=("flat",), out="flat")

        return jax.tree.map(place, state)

    on_host = AnchorShards(param_specs, bucket_bytes, local_axis_name)
    return AnchorLayout(
        lambda params: tuple(jax.tree.leaves(into_shards(store_blocks, params))),
        lambda params: tuple(jax.tree.leaves(into_shards(zero_blocks, params))),
        average,
        restore,
        pin,
        is_sharded=True,
        join=on_host.join,
        split=on_host.split,
    )
