"""The gradients as buckets, each reduced by itself."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._scopes import GRADIENTS
from .._typing import AxisName, PyTree
from ..collectives import all_mean, relative_weight, scaled, total_weight, weighted_means
from ..mesh import vary_over
from ..transform import BlockGroup, Packing, on_blocks
from ..tree import BufferPlan
from ._hook import CommHook, GradBucket, GradPiece

HookStates = tuple[Any, ...]


def reduce_plainly(
    buckets: Packing,
    grads: PyTree,
    axis_name: AxisName,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> PyTree:
    """Means by all-reduces, weighted where a weight is given.

    Communication: one all-reduce over `axis_name` per bucket; see `weighted_means`.
    """

    def of_group(first: int, group: BlockGroup, plan: BufferPlan, leaves: list[Any]) -> list[Any]:
        def means(blocks: list[Any], weight: jax.Array | None) -> list[Any]:
            flats, found = plan.pack(blocks), []
            if weight is not None:
                found = weighted_means(flats, weight, axis_name, idle_as_zeros=divide_by_initial)
                return plan.unpack(found)
            for i, flat in enumerate(flats, start=first):
                with jax.named_scope(f"bucket_{i}"):
                    found.append(all_mean(flat, axis_name))
            return plan.unpack(found)

        return on_blocks(group, means, leaves, weight, kinds=("leaves", "whole"), out="leaves")

    own = zip(buckets.numbered(), buckets.leaves(grads, GRADIENTS), strict=True)
    return buckets.tree([of_group(*each, leaves) for each, leaves in own])


def reduce_with_hook(
    hook: CommHook,
    states: HookStates,
    buckets: Packing,
    grads: PyTree,
    axis_name: AxisName,
    count: jax.Array,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> tuple[PyTree, HookStates]:
    """What the hook makes of every bucket, and its new states.

    Communication: the hook's, and with a weight one all-reduce of 8 bytes before it.
    """
    factor = None
    if weight is not None:
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name, idle_as_zeros=divide_by_initial)

    def of_group(
        first: int, group: BlockGroup, plan: BufferPlan, leaves: list[Any]
    ) -> tuple[list[Any], HookStates]:
        def reduced(
            blocks: list[Any], states: HookStates, factor: Any, count: Any
        ) -> tuple[list[Any], HookStates]:
            flats, found, after = plan.pack(blocks), [], []
            if factor is not None:
                flats = [scaled(flat, factor) for flat in flats]
            own = _hooked(buckets, first, group, flats, axis_name, count)
            for bucket, state in zip(own, _taken(group, states), strict=True):
                with jax.named_scope(f"bucket_{bucket.index}"):
                    flat, state = hook.update(bucket, state)
                _check_reduced(bucket, flat)
                found.append(flat)
                after.append(state)
            return plan.unpack(found), _kept(group, tuple(after))

        return on_blocks(
            group,
            reduced,
            leaves,
            states[first : first + len(plan.buffers)],
            factor,
            count,
            kinds=("leaves", "flat", "whole", "whole"),
            out=("leaves", "flat"),
        )

    own = zip(buckets.numbered(), buckets.leaves(grads, GRADIENTS), strict=True)
    by_group = [of_group(*each, leaves) for each, leaves in own]
    after = tuple(state for _, own in by_group for state in own)
    return buckets.tree([leaves for leaves, _ in by_group]), after


def init_hook(hook: CommHook, buckets: Packing, axis_name: AxisName) -> HookStates:
    """The hook's states, one per bucket: of sharded leaves one beside the other, for each block."""

    def of_group(first: int, group: BlockGroup, plan: BufferPlan) -> HookStates:
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in plan.buffers]
        own = _hooked(buckets, first, group, flats, axis_name, None)

        def made() -> HookStates:
            return _kept(group, tuple(hook.init(bucket) for bucket in own))

        return on_blocks(group, made, kinds=(), out="flat")

    return tuple(state for each in buckets.numbered() for state in of_group(*each))


def _kept(group: BlockGroup, states: HookStates) -> HookStates:
    """A device's own states as its part of arrays of all devices of the replica."""
    axes = group.axis_sizes
    if not axes:
        return states
    return vary_over(jax.tree.map(lambda x: jnp.asarray(x)[None], states), axes)


def _taken(group: BlockGroup, states: HookStates) -> HookStates:
    """The inverse of `_kept`."""
    return jax.tree.map(lambda x: x[0], states) if group.axis_sizes else states


def _hooked(
    buckets: Packing,
    first: int,
    group: BlockGroup,
    flats: Sequence[Any],
    axis_name: AxisName,
    count: Any,
) -> list[GradBucket]:
    """What a hook is given of one group, whose first bucket has the number `first`."""
    names, shapes = [buckets.names[i] for i in group.indices], group.block_shapes()
    buffers, found = buckets.buffers(), []
    for i, flat in enumerate(flats, start=first):
        pieces = tuple(
            GradPiece(names[p.label], shapes[p.label], p.start, p.stop) for p in buffers[i].pieces
        )
        found.append(GradBucket(i, i == len(buffers) - 1, flat, pieces, axis_name, count))
    return found


def _check_reduced(bucket: GradBucket, flat: Any) -> None:
    shape, dtype = jnp.shape(flat), jnp.result_type(flat)
    if shape != (bucket.size,) or dtype != bucket.dtype:
        raise ValueError(
            f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the bucket is, "
            f"got {shape} {dtype}."
        )
