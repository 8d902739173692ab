"""Packing of gradients into buckets, and the reduction of each bucket."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..._support.scopes import GRADIENTS
from ..._support.types import AxisName, PyTree
from ...collectives import all_mean, relative_weight, scaled, total_weight, weighted_means
from ...mesh import axis_names, typed_specs, vary_over
from ...transform import BufferGroup, TreePacking, planned_by_group
from ...tree import Buffer, BufferPlan, leaf_names, plan_buffers
from ._hook import CommHook, GradBucket, GradPiece

Order = Literal["reverse", "forward"] | Sequence[int | str]
ReadyOrder = Callable[[], Sequence[int]]
"""A function that returns the positions of all leaves; it is called where they matter."""


@dataclass(frozen=True)
class BucketLayout:
    """The options that decide which gradients share a bucket; see `all_reduce_gradients`."""

    limits: tuple[int, ...]
    order: Order | None = None
    buckets: tuple[tuple[int | str, ...], ...] | None = None
    max_buckets: int | None = None
    alone_bytes: int | None = None
    split_large: bool = False

    def planned(
        self,
        grads: PyTree,
        param_specs: PyTree | None = None,
        ready_order: ReadyOrder | None = None,
    ) -> TreePacking:
        """Return the buckets of `grads`; for sharded leaves those of a device's own blocks.

        Args:
          grads: tree of arrays or types.
          param_specs: a `PartitionSpec` per leaf, or a prefix of the tree; None: leaves are whole
            inside a replica, or their types contain specs (Explicit axes).
          ready_order: function that returns the positions of all leaves, for an `order` of None.
            It is called only if the order decides which leaves share a bucket.

        Raises:
          ValueError: specs that don't fit the tree; leaves that the gradients do not have.
        """
        names, (leaves, treedef) = leaf_names(grads), jax.tree.flatten(grads)
        specs = typed_specs(grads) if param_specs is None else param_specs
        explicit = None
        if self.buckets is not None:
            explicit = [_leaf_positions("buckets", bucket, names) for bucket in self.buckets]
            plan_buffers(grads, buckets=explicit)  # raises unless each leaf occurs once

        def plan(blocks: list[Any], place: Mapping[int, int]) -> BufferPlan:
            if explicit is not None:
                local_buckets = [[place[i] for i in bucket if i in place] for bucket in explicit]
                return plan_buffers(blocks, buckets=[bucket for bucket in local_buckets if bucket])
            order = self._order(names, ready_order, blocks)
            return plan_buffers(
                blocks,
                limits=self.limits,
                order=[place[i] for i in order if i in place],
                max_buckets=self.max_buckets,
                alone_bytes=self.alone_bytes,
                split_large=self.split_large,
            )

        return planned_by_group(treedef, leaves, specs, plan)

    def _order(
        self, names: Sequence[str], ready_order: ReadyOrder | None, blocks: list[Any]
    ) -> Sequence[int]:
        """Return the positions of all leaves, in the order in which `blocks` fill buckets."""
        if self.order == "forward":
            return range(len(names))
        if self.order is not None and self.order != "reverse":
            return _leaf_positions("order", self.order, names, whole=True)
        if self.order == "reverse" or ready_order is None or self._fit_one_bucket(blocks):
            return range(len(names))[::-1]
        return _leaf_positions("ready_order", ready_order(), names, whole=True)

    def _fit_one_bucket(self, blocks: list[Any]) -> bool:
        """Return whether in any order there is one bucket per dtype."""
        sizes = Counter[Any]()
        for block in blocks:
            sizes[block.dtype] += block.size * block.dtype.itemsize
        return self.alone_bytes is None and max(sizes.values(), default=0) <= self.limits[0]


def _leaf_positions(
    argument: str, leaves: Sequence[int | str], names: Sequence[str], *, whole: bool = False
) -> list[int]:
    """Return the positions of leaves that are listed by position or name.

    Args:
      argument: name of the argument, for messages.
      leaves: positions in flattening order, or names such as `"dense/kernel"`.
      names: names of all leaves.
      whole: whether every leaf must be listed once.

    Raises:
      ValueError: a name or position that the tree does not have; with `whole`, leaves that are
        missing or named twice.
    """
    position = {name: i for i, name in enumerate(names)}
    positions = []
    for leaf in leaves:
        i = position.get(leaf) if isinstance(leaf, str) else int(leaf)
        if i is None or not 0 <= i < len(names):
            raise ValueError(
                f"`{argument}` names leaf {leaf!r}, which the gradients do not have "
                f"({len(names)} leaves: {', '.join(names)})."
            )
        positions.append(i)
    if whole and sorted(positions) != list(range(len(names))):
        missing = [name for i, name in enumerate(names) if i not in positions]
        twice = [name for i, name in enumerate(names) if positions.count(i) > 1]
        raise ValueError(
            f"`{argument}` must name every gradient once: missing {missing}, more than once "
            f"{twice}."
        )
    return positions


HookStates = tuple[Any, ...]


def reduce_plainly(
    buckets: TreePacking,
    grads: PyTree,
    axis_name: AxisName,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> PyTree:
    """Return means by all-reduces, weighted if there is a weight.

    Communication: one all-reduce over `axis_name` per bucket; see `weighted_means`.
    """

    def means(group: BufferGroup, blocks: list[Any], weight: jax.Array | None) -> list[Any]:
        flats, reduced = group.plan.pack(blocks), []
        if weight is not None:
            reduced = weighted_means(flats, weight, axis_name, idle_as_zeros=divide_by_initial)
            return group.plan.unpack(reduced)
        for i, flat in enumerate(flats, start=group.first):
            with jax.named_scope(f"bucket_{i}"):
                reduced.append(all_mean(flat, axis_name))
        return group.plan.unpack(reduced)

    leaves = buckets.leaves(grads, GRADIENTS)
    averaged = buckets.each(means, leaves, weight, kinds=("leaves", "whole"), out="leaves")
    return buckets.tree(averaged)


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
    """Return the gradients that the hook makes of every bucket, and its new states.

    Communication: the hook's, and with a weight one all-reduce of 8 bytes before it.
    """
    factor = None
    if weight is not None:
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name, idle_as_zeros=divide_by_initial)

    def reduced(
        group: BufferGroup, blocks: list[Any], states: list[Any], factor: Any, count: Any
    ) -> tuple[list[Any], HookStates]:
        flats, results, after = group.plan.pack(blocks), [], []
        if factor is not None:
            flats = [scaled(flat, factor) for flat in flats]
        hook_buckets = _hook_buckets(buckets, group, flats, axis_name, count)
        for bucket, state in zip(hook_buckets, _without_device_axis(group, states), strict=True):
            with jax.named_scope(f"bucket_{bucket.index}"):
                flat, state = hook.update(bucket, state)
            if (flat.shape, flat.dtype) != ((bucket.size,), bucket.dtype):
                raise ValueError(
                    f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the "
                    f"bucket is, got {flat.shape} {flat.dtype}."
                )
            results.append(flat)
            after.append(state)
        return group.plan.unpack(results), _with_device_axis(group, tuple(after))

    by_group = buckets.each(
        reduced,
        buckets.leaves(grads, GRADIENTS),
        buckets.by_group(states),
        factor,
        count,
        kinds=("leaves", "flat", "whole", "whole"),
        out=("leaves", "flat"),
    )
    after = tuple(state for _, group_states in by_group for state in group_states)
    return buckets.tree([leaves for leaves, _ in by_group]), after


def init_hook(hook: CommHook, buckets: TreePacking, axis_name: AxisName) -> HookStates:
    """Return the hook's states, one per bucket; for sharded leaves stacked, one per block.

    They differ between replicas and devices.
    """

    def group_init(group: BufferGroup) -> HookStates:
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in group.plan.buffers]
        hook_buckets = _hook_buckets(buckets, group, flats, axis_name, None)
        return _with_device_axis(group, tuple(hook.init(bucket) for bucket in hook_buckets))

    by_group = buckets.each(group_init, kinds=(), out="flat")
    return vary_over(tuple(state for states in by_group for state in states), axis_names(axis_name))


def _with_device_axis(group: BufferGroup, states: HookStates) -> HookStates:
    """Return a device's local states as its part of arrays over all devices of the replica."""
    if not group.axis_sizes:
        return states
    return jax.tree.map(lambda x: jnp.asarray(x)[None], states)


def _without_device_axis(group: BufferGroup, states: Sequence[Any]) -> Sequence[Any]:
    """Return a device's local states from its part of such arrays."""
    return jax.tree.map(lambda x: x[0], states) if group.axis_sizes else states


def _hook_buckets(
    buckets: TreePacking, group: BufferGroup, flats: Sequence[Any], axis_name: AxisName, count: Any
) -> list[GradBucket]:
    """Return the buckets of one group that the hook receives."""
    names = [buckets.names[i] for i in group.indices]
    shapes, last = group.plan.shapes, len(buckets.buffers()) - 1

    def pieces(buffer: Buffer) -> tuple[GradPiece, ...]:
        return tuple(
            GradPiece(names[p.label], shapes[p.label], p.start, p.stop) for p in buffer.pieces
        )

    numbered = enumerate(zip(group.plan.buffers, flats, strict=True), start=group.first)
    return [
        GradBucket(i, i == last, flat, pieces(buffer), axis_name, count)
        for i, (buffer, flat) in numbered
    ]
