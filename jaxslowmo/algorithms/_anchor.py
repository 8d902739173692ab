"""Where slow state lives: sharded over the replicas, whole on each, or each its own.

The outer step is the same for all three. A layout says how the anchor is stored, how the average
of the replicas reaches that form, and how parameters are restored from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._typing import AxisName, PyTree
from ..collectives import ShardLayout, all_gather_shards, mean_to_shards, own_shard, shard_layout
from ..mesh import axis_size
from ..tree import BufferPlan, exchange_dtype, plan_buffers
from ._blocks import bucket_limits, on_local_blocks, replica_mean


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(exchange_dtype(x.dtype)), tree)


@dataclass(frozen=True)
class AnchorLayout:
    """Three functions on per-replica trees.

    Attributes:
      store: `store(params) -> anchor`: the anchor of given parameters; no communication.
      average: `average(y) -> avg`: mean of `y` over replicas, in the anchor's form.
      restore: `restore(anchor, params) -> tree`: float32 values in the shape of the parameters.
    """

    store: Callable[[PyTree], Any]
    average: Callable[[PyTree], Any]
    restore: Callable[[Any, PyTree], PyTree]


def own_anchor() -> AnchorLayout:
    """Each replica keeps its own anchor and averages nothing.

    Communication: none.
    """
    return AnchorLayout(_wide, lambda y: y, lambda anchor, params: anchor)


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
        return on_local_blocks(
            lambda tree: replica_mean(tree, axis_name, local_axis_name, bucket_bytes),
            param_specs,
            y,
        )

    return AnchorLayout(_wide, average, lambda anchor, params: anchor)


def sharded_anchor(
    axis_name: AxisName,
    local_axis_name: AxisName | None,
    param_specs: PyTree | None,
    bucket_bytes: int | None,
) -> AnchorLayout:
    """Each replica keeps 1/R of the anchor, as a tuple of `(rows, lanes)` float32 shards.

    Communication: `average` is one reduce-scatter, `restore` one all-gather of N bytes over
    `axis_name` per buffer.
    """

    def plan_of(tree: PyTree) -> BufferPlan:
        return plan_buffers(tree, limits=bucket_limits(bucket_bytes), dtype_of=exchange_dtype)

    def layouts(plan: BufferPlan) -> list[ShardLayout]:
        shards = axis_size(axis_name)
        parts = 1 if local_axis_name is None else axis_size(local_axis_name)
        return [shard_layout(b.num_elements, shards, num_parts=parts) for b in plan.buffers]

    def store(params: PyTree) -> tuple[jax.Array, ...]:
        plan = plan_of(params)
        return tuple(
            own_shard(flat, layout, axis_name)
            for flat, layout in zip(plan.pack(params), layouts(plan), strict=True)
        )

    def average(y: PyTree) -> tuple[jax.Array, ...]:
        plan = plan_of(y)
        return tuple(
            mean_to_shards(flat, layout, axis_name, local_axis_name)
            for flat, layout in zip(plan.pack(y), layouts(plan), strict=True)
        )

    def restore(anchor: tuple[jax.Array, ...], params: PyTree) -> PyTree:
        plan = plan_of(params)
        return plan.unpack(
            [
                all_gather_shards(shard, b.num_elements, axis_name, local_axis_name)
                for shard, b in zip(anchor, plan.buffers, strict=True)
            ]
        )

    return AnchorLayout(
        lambda params: on_local_blocks(store, param_specs, params, out_specs="flat"),
        lambda y: on_local_blocks(average, param_specs, y, out_specs="flat"),
        lambda anchor, params: on_local_blocks(
            restore, param_specs, anchor, params, in_specs=("flat", param_specs)
        ),
    )
