"""The gradients as buckets, each reduced by itself."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import AxisName, PyTree
from ..collectives import all_mean, relative_weight, scaled, total_weight, weighted_means
from ..mesh import vary_over
from ..transform import on_blocks
from ._bucket_layout import BucketGroup, Buckets
from ._hook import CommHook, GradBucket, GradPiece

HookStates = tuple[Any, ...]


def reduce_plainly(
    buckets: Buckets,
    grads: PyTree,
    axis_name: AxisName,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> PyTree:
    """Means by all-reduces, weighted where a weight is given.

    Communication: one all-reduce over `axis_name` per bucket; see `weighted_means`.
    """

    def means(group: BucketGroup, blocks: list[Any], weight: jax.Array | None) -> list[Any]:
        flats, found = group.plan.pack(blocks), []
        if weight is not None:
            found = weighted_means(flats, weight, axis_name, idle_as_zeros=divide_by_initial)
            return group.plan.unpack(found)
        for i, flat in enumerate(flats, start=group.first):
            with jax.named_scope(f"bucket_{i}"):
                found.append(all_mean(flat, axis_name))
        return group.plan.unpack(found)

    def of_group(group: BucketGroup, leaves: list[Any]) -> list[Any]:
        return on_blocks(
            group.leaves,
            partial(means, group),
            leaves,
            weight,
            kinds=("leaves", "whole"),
            out="leaves",
        )

    return buckets.tree(buckets.each(of_group, grads))


def reduce_with_hook(
    hook: CommHook,
    states: HookStates,
    buckets: Buckets,
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

    def reduced(
        group: BucketGroup, blocks: list[Any], states: HookStates, factor: Any, count: Any
    ) -> tuple[list[Any], HookStates]:
        flats, found, after = group.plan.pack(blocks), [], []
        if factor is not None:
            flats = [scaled(flat, factor) for flat in flats]
        own = grad_buckets(group, flats, axis_name, count, buckets.count)
        for bucket, state in zip(own, _taken(group, states), strict=True):
            with jax.named_scope(f"bucket_{bucket.index}"):
                flat, state = hook.update(bucket, state)
            _check_reduced(bucket, flat)
            found.append(flat)
            after.append(state)
        return group.plan.unpack(found), _kept(group, tuple(after))

    def of_group(group: BucketGroup, leaves: list[Any]) -> tuple[list[Any], HookStates]:
        own = states[group.first : group.first + len(group.plan.buffers)]
        return on_blocks(
            group.leaves,
            partial(reduced, group),
            leaves,
            own,
            factor,
            count,
            kinds=("leaves", "flat", "whole", "whole"),
            out=("leaves", "flat"),
        )

    by_group = buckets.each(of_group, grads)
    after = tuple(state for _, own in by_group for state in own)
    return buckets.tree([leaves for leaves, _ in by_group]), after


def init_hook(hook: CommHook, buckets: Buckets, axis_name: AxisName) -> HookStates:
    """The hook's states, one per bucket: of sharded leaves one beside the other, for each block."""

    def of_group(group: BucketGroup) -> HookStates:
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in group.plan.buffers]
        own = grad_buckets(group, flats, axis_name, None, buckets.count)

        def made() -> HookStates:
            return _kept(group, tuple(hook.init(bucket) for bucket in own))

        return on_blocks(group.leaves, made, kinds=(), out="flat")

    return tuple(state for group in buckets.groups for state in of_group(group))


def _kept(group: BucketGroup, states: HookStates) -> HookStates:
    """A device's own states as its part of arrays of all devices of the replica."""
    axes = group.leaves.axis_sizes
    if not axes:
        return states
    return vary_over(jax.tree.map(lambda x: jnp.asarray(x)[None], states), axes)


def _taken(group: BucketGroup, states: HookStates) -> HookStates:
    """The inverse of `_kept`."""
    return jax.tree.map(lambda x: x[0], states) if group.leaves.axis_sizes else states


def grad_buckets(
    group: BucketGroup, flats: Sequence[Any], axis_name: AxisName, count: Any, num_buckets: int
) -> list[GradBucket]:
    """What hooks are given."""
    plan = group.plan
    return [
        GradBucket(
            index=i,
            is_last=i == num_buckets - 1,
            flat=flat,
            pieces=tuple(
                GradPiece(group.names[p.label], plan.shapes[p.label], p.start, p.stop)
                for p in buffer.pieces
            ),
            axis_name=axis_name,
            count=count,
        )
        for i, (buffer, flat) in enumerate(zip(plan.buffers, flats, strict=True), start=group.first)
    ]


def _check_reduced(bucket: GradBucket, flat: Any) -> None:
    shape, dtype = jnp.shape(flat), jnp.result_type(flat)
    if shape != (bucket.size,) or dtype != bucket.dtype:
        raise ValueError(
            f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the bucket is, "
            f"got {shape} {dtype}."
        )
