"""The mean of gradients over replicas, by all-reduces of buckets."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._support.checks import check_choice, checked_int, warn_once
from ..._support.scopes import ALL_REDUCE_GRADIENTS
from ..._support.settings import records_settings
from ..._support.types import AxisName, PyTree
from ...mesh import axis_names, axis_size, require_axes
from ...transform import (
    GradientTransform,
    Reduction,
    check_weight,
    checked_bytes,
    checked_group,
    gradient_state,
    increment,
)
from ...tree import MIB, check_floating
from .._leaves import check_varying
from ..sparse import DivideBy, mean_rows, split_rows
from ._hook import CommHook, check_hook
from ._reduce_buckets import (
    BucketLayout,
    Order,
    ReadyOrder,
    all_reduce_buckets,
    init_hook,
    reduce_with_hook,
)

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
                    f"{_OWNER}: leaves that are sharded inside a replica are gathered for each "
                    "exchange, since the states of `hook` are of whole leaves: pass `param_specs`, "
                    "one PartitionSpec per leaf (P() for whole ones)."
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
    group, layout = (
        checked_group(_OWNER, axis_name, param_specs=param_specs),
        BucketLayout(BUCKET_LIMITS),
    )
    with jax.named_scope(_OWNER):
        return all_reduce_buckets(group, layout, grads, weight, False, ready_order)
