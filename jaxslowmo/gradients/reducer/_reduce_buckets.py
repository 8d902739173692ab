"""Packing of gradients into buckets, and the reduction of each bucket."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._support.scopes import GRADIENTS
from ..._support.types import AxisName, PyTree
from ...collectives import all_mean, relative_weight, scale, total_weight, weighted_means
from ...mesh import axis_names, vary_over
from ...transform import Arrays, ReplicaGroup, TreePacking
from ...tree import Buffer, leaf_names, plan_buffers
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

    def plan(
        self, grads: PyTree, group: ReplicaGroup, ready_order: ReadyOrder | None = None
    ) -> TreePacking:
        """Return the buckets of a device's blocks of `grads`.

        Args:
          grads: tree of arrays or types.
          group: the replicas, and the layouts of leaves inside them.
          ready_order: function that returns the positions of all leaves, for an `order` of None.
            It is called only if the order decides which leaves share a bucket.

        Raises:
          ValueError: specs that don't fit the tree; leaves that the gradients do not have.
        """
        names, treedef = leaf_names(grads), jax.tree.structure(grads)
        blocks = jax.tree.leaves(group.blocks(grads))
        if self.buckets is not None:
            listed = [_leaf_positions("buckets", bucket, names) for bucket in self.buckets]
            return TreePacking(treedef, plan_buffers(blocks, buckets=listed))
        plan = plan_buffers(
            blocks,
            limits=self.limits,
            order=self._order(names, ready_order, blocks),
            max_buckets=self.max_buckets,
            alone_bytes=self.alone_bytes,
            split_large=self.split_large,
        )
        return TreePacking(treedef, plan)

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


def all_reduce_buckets(
    group: ReplicaGroup,
    layout: BucketLayout,
    grads: PyTree,
    weight: jax.Array | None,
    divide_by_initial: bool,
    ready_order: ReadyOrder | None = None,
) -> PyTree:
    """Return means by all-reduces, weighted if there is a weight.

    Leaves of which only the compiler knows how they are sharded are reduced one by one.

    Communication: one all-reduce over the group per bucket; see `weighted_means`.
    """
    axes = group.axis_name

    def means(flats: list[Any], weight: jax.Array | None) -> list[Any]:
        if weight is not None:
            return weighted_means(flats, weight, axes, idle_as_zeros=divide_by_initial)
        reduced = []
        for i, flat in enumerate(flats):
            with jax.named_scope(f"bucket_{i}"):
                reduced.append(all_mean(flat, axes))
        return reduced

    own = group.local(grads)
    if own.specs is None:
        leaves, treedef = jax.tree.flatten(grads)
        return treedef.unflatten(means(leaves, weight))
    buckets = layout.plan(grads, group, ready_order)

    def mean_blocks(_: ReplicaGroup, grads: PyTree, weight: jax.Array | None) -> list[PyTree]:
        return [buckets.unpack(means(buckets.pack(grads, role=GRADIENTS), weight))]

    return group.run(mean_blocks, [own, group.equal(weight)], own)[0]


def reduce_with_hook(
    hook: CommHook,
    states: HookStates,
    group: ReplicaGroup,
    layout: BucketLayout,
    grads: PyTree,
    count: jax.Array,
    weight: jax.Array | None,
    divide_by_initial: bool,
    ready_order: ReadyOrder | None,
) -> tuple[PyTree, HookStates]:
    """Return the gradients that the hook makes of every bucket, and its new states.

    Communication: the hook's, and with a weight one all-reduce of 8 bytes before it.
    """
    axes, factor = group.axis_name, None
    if weight is not None:
        total = total_weight(weight, axes)
        factor = relative_weight(weight, total, axes, idle_as_zeros=divide_by_initial)
    buckets, own = layout.plan(grads, group, ready_order), group.local(grads)
    holds_none = not jax.tree.leaves(states)

    def reduce_blocks(
        _: ReplicaGroup, grads: PyTree, states: HookStates, factor: Any, count: jax.Array
    ) -> list[Any]:
        flats, results, after = buckets.pack(grads, role=GRADIENTS), [], []
        if factor is not None:
            flats = [scale(flat, factor) for flat in flats]
        hook_buckets = _hook_buckets(buckets, flats, axes, count)
        old = [hook.init(x) for x in hook_buckets] if holds_none else _unstack_device(own, states)
        for bucket, state in zip(hook_buckets, old, strict=True):
            with jax.named_scope(f"bucket_{bucket.index}"):
                flat, state = hook.update(bucket, state)
            if (flat.shape, flat.dtype) != ((bucket.size,), bucket.dtype):
                raise ValueError(
                    f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the "
                    f"bucket is, got {flat.shape} {flat.dtype}."
                )
            results.append(flat)
            after.append(state)
        return [buckets.unpack(results), _stack_devices(own, tuple(after))]

    stacked = Arrays(states, [_device_spec(own)] * len(jax.tree.leaves(states)))
    args = [own, stacked, group.equal(factor), group.equal(count)]
    grads, after = group.run(reduce_blocks, args, own, stacked, packs=True)
    return grads, states if holds_none else after


def init_hook(
    hook: CommHook, group: ReplicaGroup, layout: BucketLayout, params: PyTree
) -> HookStates:
    """Return the hook's states, one per bucket; for sharded leaves stacked over their devices.

    They differ between replicas and devices.
    """
    buckets, own = layout.plan(params, group), group.local(params)

    def init(_: ReplicaGroup, params: PyTree) -> list[HookStates]:
        del params
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in buckets.plan.buffers]
        hook_buckets = _hook_buckets(buckets, flats, group.axis_name, None)
        return [_stack_devices(own, tuple(hook.init(bucket) for bucket in hook_buckets))]

    any_states = Arrays(0, [_device_spec(own)])  # one layout for all of them
    states = group.run(init, [own], any_states, packs=True)[0]
    return vary_over(states, axis_names(group.axis_name))


def _device_spec(own: Arrays) -> P:
    """Return the spec of the devices' states: stacked over the axes that shard some leaf."""
    named = {name for spec in own.specs or () for entry in spec for name in axis_names(entry or ())}
    return P(tuple(sorted(named))) if named else P()


def _stack_devices(own: Arrays, states: HookStates) -> HookStates:
    """Return a device's states as its part of arrays over all devices of the replica."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], states) if _device_spec(own) else states


def _unstack_device(own: Arrays, states: HookStates) -> HookStates:
    """Return a device's states from its part of such arrays: the inverse of `_stack_devices`."""
    return jax.tree.map(lambda x: x[0], states) if _device_spec(own) else states


def _hook_buckets(
    buckets: TreePacking, flats: Sequence[Any], axis_name: AxisName, count: Any
) -> list[GradBucket]:
    """Return the buckets that the hook receives."""
    plan = buckets.plan

    def pieces(buffer: Buffer) -> tuple[GradPiece, ...]:
        return tuple(
            GradPiece(buckets.names[p.label], plan.shapes[p.label], p.start, p.stop)
            for p in buffer.pieces
        )

    last = len(plan.buffers) - 1
    numbered = enumerate(zip(plan.buffers, flats, strict=True))
    return [
        GradBucket(i, i == last, flat, pieces(buffer), axis_name, count)
        for i, (buffer, flat) in numbered
    ]
