"""The mean of gradients over replicas, by all-reduces of buckets."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._support.checks import check_choice, checked_int, records_settings, warn_once
from .._support.scopes import ALL_REDUCE_GRADIENTS, GRADIENTS
from .._support.types import AxisName, PyTree
from ..collectives import all_mean, relative_weight, scale, total_weight, weighted_means
from ..mesh import axis_names, axis_size, require_axes, vary_over
from ..transform import (
    Arrays,
    GradientTransform,
    Reduction,
    ReplicaGroup,
    check_weight,
    checked_bytes,
    checked_group,
    gradient_state,
    increment,
)
from ..tree import MIB, Buffer, BufferPlan, check_floating, leaf_names, plan_buffers
from ._hook import CommHook, GradBucket, GradPiece, check_hook
from ._leaves import check_varying
from .sparse import DivideBy, mean_rows, split_rows

Order = Literal["reverse", "forward"] | Sequence[int | str]
ReadyOrder = Callable[[], Sequence[int]]
"""A function that returns the positions of all leaves; it is called where they matter."""

BUCKET_LIMITS = (MIB, 25 * MIB)  # first bucket and the others, as in torch's reducer
_OWNER = ALL_REDUCE_GRADIENTS


@gradient_state
class AllReduceGradientsState(NamedTuple):
    """State of `all_reduce_gradients`: empty without a hook."""

    count: jax.Array | tuple[()] = ()  # () int32, updates so far; equal on all replicas
    hook: PyTree = ()  # the hook's states, one per bucket


@records_settings
def all_reduce_gradients(
    axis_name: AxisName,
    *,
    bucket_bytes: int = BUCKET_LIMITS[1],
    first_bucket_bytes: int = BUCKET_LIMITS[0],
    order: Order | None = None,
    buckets: Sequence[Sequence[int | str]] | None = None,
    max_buckets: int | None = None,
    alone_bytes: int | None = None,
    split_large: bool = False,
    hook: CommHook | None = None,
    divide_by: DivideBy = "initial",
    param_specs: PyTree | None = None,
) -> GradientTransform:
    """Average the gradients over replicas, in flat buckets.

    Use it as the first transform of a chain; it does what the Reducer of torch's
    `DistributedDataParallel` does. Gradients are packed into flat buckets of one dtype each. The
    first bucket holds the gradients that the backward pass finishes first, and is small so that
    communication starts early.
    More on each argument: [docs/api/gradients.md](#details).

    Args:
      axis_name: mapped axis to average over, or under shard_map a tuple of axes.
      bucket_bytes: a bucket closes when it reaches this size; 0 gives one bucket per leaf.
      first_bucket_bytes: size in bytes of the first bucket of each dtype.
      order: the order in which gradients fill buckets: `"reverse"` or `"forward"` leaf order, or
        all leaves by position or name. None: the order in which the backward pass finishes them.
      buckets: the buckets themselves, lists of positions or names; replaces sizes and order.
      max_buckets: largest number of buckets; see `js.assign_buckets`.
      alone_bytes: leaves of at least this size form a bucket each; None packs all leaves.
      split_large: whether leaves that are larger than a bucket are cut.
      hook: a `js.hooks.CommHook` that reduces each bucket, or None for the plain mean.
      divide_by: whether replicas of weight 0 count in the divisor: `"initial"` yes, `"active"` no.
      param_specs: `PartitionSpec` per leaf, or a prefix of the tree, over automatic axes inside a
        replica, for leaves that are sharded there; each device reduces its own blocks.

    Returns:
      A transform with state `AllReduceGradientsState`. `update(grads, state, params=None,
      weight=None, ready_order=None, param_specs=None)` returns the mean gradients, in the
      gradients' shapes and dtypes. `weight`: () number, this replica's share in the mean; with 0
      its gradients are ignored, NaN included.

    Raises:
      ValueError: negative sizes, an invalid order, hook or `divide_by`; at trace time an unbound
        axis, names, specs or leaves that do not fit, gradients that do not vary over `axis_name`.
      UserWarning: once, if the axis has size 1, and in a step where a hook gathers sharded leaves.

    Communication: every update, one all-reduce over `axis_name` per bucket, N bytes together, N the
      bytes of the gradients; a weight adds 8 bytes. With a hook: what the hook states.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2 (bucketing); torch 2.13,
      `DistributedDataParallel` and `Join` (weights of 0 and 1).
    """
    over = checked_group(_OWNER, axis_name, param_specs=param_specs)
    if max_buckets is not None:
        max_buckets = checked_int(f"{_OWNER}: `max_buckets`", max_buckets, 1)
    if alone_bytes is not None:
        alone_bytes = checked_bytes(_OWNER, "alone_bytes", alone_bytes)
    layout = BucketLayout(
        limits=(
            checked_bytes(_OWNER, "first_bucket_bytes", first_bucket_bytes),
            checked_bytes(_OWNER, "bucket_bytes", bucket_bytes),
        ),
        order=order,
        buckets=None if buckets is None else tuple(map(tuple, buckets)),
        max_buckets=max_buckets,
        alone_bytes=alone_bytes,
        split_large=split_large,
    )
    if hook is not None:
        check_hook(_OWNER, hook)
    check_choice("divide_by", divide_by, DivideBy, _OWNER)
    by_initial = divide_by == "initial"
    warn = warn_once()

    def init_fn(params: PyTree) -> AllReduceGradientsState:
        if hook is None:
            return AllReduceGradientsState()
        states: PyTree = ()
        # optax.tree_utils.tree_map_params inits with an empty tree, which no order fits.
        if jax.tree.leaves(params):
            require_axes(_OWNER, "axis_name", axis_name)
            check_floating(_OWNER, params)
            states = init_hook(hook, over, layout, params)
        return AllReduceGradientsState(jnp.zeros([], jnp.int32), states)

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        ready_order: ReadyOrder | None = None,
        param_specs: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        updates, rows, inner_axes, join = split_rows(updates)
        require_axes(_OWNER, "axis_name", axis_name)
        check_floating(_OWNER, updates)
        check_varying(_OWNER, updates, axis_name)
        share = check_weight(_OWNER, weight)
        if axis_size(axis_name) == 1:
            warn(f"{_OWNER}: axis {axis_name!r} has size 1, so there is nothing to reduce.")
        group = over if param_specs is None else over.with_layout(None, param_specs)
        if hook is not None and jax.tree.leaves(state.hook):
            # The buckets are those of `init`, which received no `ready_order` or specs.
            ready_order, group = None, over
            if over.param_specs is None and any(jax.tree.leaves(param_specs)):
                warn(
                    f"{_OWNER}: sharded leaves are gathered for each exchange, since states of "
                    "`hook` are of whole leaves: pass `param_specs`, one PartitionSpec per leaf."
                )
        with jax.named_scope(_OWNER):
            others = tuple(name for name in axis_names(axis_name) if name not in inner_axes)
            rows = mean_rows(rows, others, share, divide_by) if rows else rows
            if hook is None:
                means = all_reduce_buckets(group, layout, updates, share, by_initial, ready_order)
                return join(dense=means, rows=rows), state
            count = increment(state.count)
            means, states = reduce_with_hook(
                hook, state.hook, group, layout, updates, count, share, by_initial, ready_order
            )
        return join(dense=means, rows=rows), AllReduceGradientsState(count, states)

    takes = frozenset({"weight", "ready_order", "param_specs"})
    spec = Reduction(axes=axis_names(axis_name), takes=takes, of_rows=True)
    return GradientTransform(init_fn, update_fn, spec)


def mean_gradients(
    grads: PyTree,
    axis_name: AxisName,
    ready_order: ReadyOrder | None = None,
    param_specs: PyTree | None = None,
    weight: jax.Array | None = None,
) -> PyTree:
    """Return the mean of `grads` over `axis_name`, in buckets of the default sizes.

    `weight`, () float32, is that of this device's gradients in the mean; None: all are equal.

    Communication: one all-reduce over `axis_name` per bucket.
    """
    group = checked_group(_OWNER, axis_name, param_specs=param_specs)
    with jax.named_scope(_OWNER):
        layout = BucketLayout(BUCKET_LIMITS)
        return all_reduce_buckets(group, layout, grads, weight, False, ready_order)


# Buckets.


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
    ) -> BufferPlan:
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
            return plan_buffers(treedef.unflatten(blocks), buckets=listed)
        return plan_buffers(
            treedef.unflatten(blocks),
            limits=self.limits,
            order=self._order(names, ready_order, blocks),
            max_buckets=self.max_buckets,
            alone_bytes=self.alone_bytes,
            split_large=self.split_large,
        )

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


# Hooks.

HookStates = tuple[Any, ...]


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
                    f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype}, got "
                    f"{flat.shape} {flat.dtype}."
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
        flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in buckets.buffers]
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
    buckets: BufferPlan, flats: Sequence[Any], axis_name: AxisName, count: Any
) -> list[GradBucket]:
    """Return the buckets that the hook receives."""

    def pieces(buffer: Buffer) -> tuple[GradPiece, ...]:
        return tuple(
            GradPiece(buckets.names[p.label], buckets.shapes[p.label], p.start, p.stop)
            for p in buffer.pieces
        )

    last = len(buckets.buffers) - 1
    numbered = enumerate(zip(buckets.buffers, flats, strict=True))
    return [
        GradBucket(i, i == last, flat, pieces(buffer), axis_name, count)
        for i, (buffer, flat) in numbered
    ]
