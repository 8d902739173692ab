"""The gradients as buckets, each reduced by itself."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.scopes import GRADIENTS
from ..._support.types import AxisName, PyTree
from ...collectives import all_mean, relative_weight, scaled, total_weight, weighted_means
from ...mesh import vary_over
from ...transform import BufferGroup, TreePacking
from ...tree import Buffer
from ._hook import CommHook, GradBucket, GradPiece

HookStates = tuple[Any, ...]


def reduce_plainly(
    buckets: TreePacking,
    grads: PyTree,
    axis_name: AxisName,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> PyTree:
    """Means by all-reduces, weighted where a weight is given.

    Communication: one all-reduce over `axis_name` per bucket; see `weighted_means`.
    """

    def means(group: BufferGroup, blocks: list[Any], weight: jax.Array | None) -> list[Any]:
        flats, found = group.plan.pack(blocks), []
        if weight is not None:
            found = weighted_means(flats, weight, axis_name, idle_as_zeros=divide_by_initial)
            return group.plan.unpack(found)
        for i, flat in enumerate(flats, start=group.first):
            with jax.named_scope(f"bucket_{i}"):
                found.append(all_mean(flat, axis_name))
        return group.plan.unpack(found)

    own = buckets.leaves(grads, GRADIENTS)
    return buckets.tree(buckets.each(means, own, weight, kinds=("leaves", "whole"), out="leaves"))


def reduce_with_hook(
    hook: CommHook,
    states: HookStates,
    buckets: TreePacking,
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
        group: BufferGroup, blocks: list[Any], states: list[Any], factor: Any, count: Any
    ) -> tuple[list[Any], HookStates]:
        flats, found, after = group.plan.pack(blocks), [], []
        if factor is not None:
            flats = [scaled(flat, factor) for flat in flats]
        own = _hooked(buckets, group, flats, axis_name, count)
        for bucket, state in zip(own, _taken(group, states), strict=True):
            with jax.named_scope(f"bucket_{bucket.index}"):
                flat, state = hook.update(bucket, state)
            _check_reduced(bucket, flat)
            found.append(flat)
            after.append(state)
        return group.plan.unpack(found), _kept(group, tuple(after))

    by_group = buckets.each(
        reduced,
        buckets.leaves(grads, GRADIENTS),
        buckets.by_group(states),
        factor,
        count,
        kinds=("leaves", "flat", "whole", "whole"),
        out=("leaves", "flat"),
    )
    after = tuple(state for _, own in by_group for state in own)
    return buckets.tree([leaves for leaves, _ in by_group]), after


def init_hook(hook: CommHook, buckets: TreePacking, axis_name: AxisName) -> HookStates:
    """The hook's states, one per bucket: of sharded leaves one beside the other, for each block."""

    def made(group: BufferGroup) -> HookStates:
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in group.plan.buffers]
        own = _hooked(buckets, group, flats, axis_name, None)
        return _kept(group, tuple(hook.init(bucket) for bucket in own))

    return tuple(state for own in buckets.each(made, kinds=(), out="flat") for state in own)


def _kept(group: BufferGroup, states: HookStates) -> HookStates:
    """A device's own states as its part of arrays of all devices of the replica."""
    axes = group.leaves.axis_sizes
    if not axes:
        return states
    return vary_over(jax.tree.map(lambda x: jnp.asarray(x)[None], states), axes)


def _taken(group: BufferGroup, states: Sequence[Any]) -> Sequence[Any]:
    """The inverse of `_kept`."""
    return jax.tree.map(lambda x: x[0], states) if group.leaves.axis_sizes else states


def _hooked(
    buckets: TreePacking, group: BufferGroup, flats: Sequence[Any], axis_name: AxisName, count: Any
) -> list[GradBucket]:
    """What a hook is given of one group."""
    names = [buckets.names[i] for i in group.leaves.indices]
    shapes, last = group.plan.shapes, len(buckets.buffers()) - 1

    def bucket(buffer: Buffer, flat: Any, i: int) -> GradBucket:
        pieces = tuple(
            GradPiece(names[p.label], shapes[p.label], p.start, p.stop) for p in buffer.pieces
        )
        return GradBucket(i, i == last, flat, pieces, axis_name, count)

    numbers = itertools.count(group.first)
    return list(map(bucket, group.plan.buffers, flats, numbers))


def _check_reduced(bucket: GradBucket, flat: Any) -> None:
    shape, dtype = jnp.shape(flat), jnp.result_type(flat)
    if shape != (bucket.size,) or dtype != bucket.dtype:
        raise ValueError(
            f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the bucket is, "
            f"got {shape} {dtype}."
        )
