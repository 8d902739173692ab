"""The gradients as buckets, each reduced by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._scopes import GRADIENTS
from .._typing import AxisName, PyTree
from ..collectives import all_mean, relative_weight, scaled, total_weight, weighted_means
from ..tree import BufferPlan, leaf_names, note_buffers, plan_buffers
from ._hook import CommHook, GradBucket, GradPiece

Order = Literal["reverse", "forward"] | Sequence[int | str]


@dataclass(frozen=True)
class BucketLayout:
    """How gradients are put into buckets; see `all_reduce_gradients`."""

    limits: tuple[int, ...]
    order: Order = "reverse"
    buckets: tuple[tuple[int | str, ...], ...] | None = None
    max_buckets: int | None = None
    alone_bytes: int | None = None
    split_large: bool = False

    def plan(self, grads: PyTree, ready_order: Sequence[int] | None = None) -> BufferPlan:
        """The buckets of `grads`; `ready_order` takes the place of the default order."""
        names = leaf_names(grads)
        if self.buckets is not None:
            explicit = [_leaf_positions("buckets", bucket, names) for bucket in self.buckets]
            return plan_buffers(grads, buckets=explicit)
        if ready_order is not None and self.order == "reverse":
            order = _leaf_positions("ready_order", ready_order, names, whole=True)
        elif self.order == "reverse":
            order = range(len(names))[::-1]
        elif self.order == "forward":
            order = range(len(names))
        else:
            order = _leaf_positions("order", self.order, names, whole=True)
        return plan_buffers(
            grads,
            limits=self.limits,
            order=order,
            max_buckets=self.max_buckets,
            alone_bytes=self.alone_bytes,
            split_large=self.split_large,
        )


def grad_buckets(
    plan: BufferPlan, names: Sequence[str], flats: Sequence[Any], axis_name: AxisName, count: Any
) -> list[GradBucket]:
    """What hooks are given."""
    last = len(plan.buffers) - 1
    return [
        GradBucket(
            index=i,
            is_last=i == last,
            flat=flat,
            pieces=tuple(
                GradPiece(names[p.label], plan.shapes[p.label], p.start, p.stop)
                for p in buffer.pieces
            ),
            axis_name=axis_name,
            count=count,
        )
        for i, (buffer, flat) in enumerate(zip(plan.buffers, flats, strict=True))
    ]


def init_hook(hook: CommHook, plan: BufferPlan, names: Sequence[str], axis_name: AxisName) -> Any:
    """The hook's states, one per bucket."""
    flats = [jax.ShapeDtypeStruct((b.num_elements,), b.dtype) for b in plan.buffers]
    return tuple(hook.init(b) for b in grad_buckets(plan, names, flats, axis_name, None))


def reduce_plainly(
    plan: BufferPlan,
    grads: PyTree,
    axis_name: AxisName,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> PyTree:
    """Means by all-reduces, weighted where a weight is given.

    Communication: one all-reduce over `axis_name` per bucket; see `weighted_means`.
    """
    note_buffers(GRADIENTS, plan, leaf_names(grads))
    flats = plan.pack(grads)
    if weight is None:
        means = []
        for i, flat in enumerate(flats):
            with jax.named_scope(f"bucket_{i}"):
                means.append(all_mean(flat, axis_name))
        return plan.unpack(means)
    return plan.unpack(weighted_means(flats, weight, axis_name, idle_as_zeros=divide_by_initial))


def reduce_with_hook(
    hook: CommHook,
    states: Any,
    plan: BufferPlan,
    grads: PyTree,
    axis_name: AxisName,
    count: jax.Array,
    weight: jax.Array | None,
    divide_by_initial: bool,
) -> tuple[PyTree, Any]:
    """What the hook makes of every bucket, and its new states.

    Communication: the hook's, and with a weight one all-reduce of 8 bytes before it.
    """
    note_buffers(GRADIENTS, plan, leaf_names(grads))
    flats = plan.pack(grads)
    if weight is not None:
        total = total_weight(weight, axis_name)
        factor = relative_weight(weight, total, axis_name, idle_as_zeros=divide_by_initial)
        flats = [scaled(flat, factor) for flat in flats]
    reduced, after = [], []
    names = leaf_names(grads)
    for bucket, state in zip(
        grad_buckets(plan, names, flats, axis_name, count), states, strict=True
    ):
        with jax.named_scope(f"bucket_{bucket.index}"):
            flat, state = hook.update(bucket, state)
        _check_reduced(bucket, flat)
        reduced.append(flat)
        after.append(state)
    return plan.unpack(reduced), tuple(after)


def _check_reduced(bucket: GradBucket, flat: Any) -> None:
    shape, dtype = jnp.shape(flat), jnp.result_type(flat)
    if shape != (bucket.size,) or dtype != bucket.dtype:
        raise ValueError(
            f"`hook`: the reduced bucket must be ({bucket.size},) {bucket.dtype} as the bucket is, "
            f"got {shape} {dtype}."
        )


def check_order(owner: str, order: object) -> None:
    """At construction: `ValueError` unless it can be an order."""
    if isinstance(order, str):
        if order == "ready":
            raise ValueError(
                f'{owner}: `order`="ready" is known once the step is traced: use '
                'js.make_train_step(order="ready"), or pass order=js.ready_order(loss_fn, params, '
                "batch)."
            )
        if order not in ("reverse", "forward"):
            raise ValueError(
                f'{owner}: `order` must be "reverse", "forward" or a sequence of leaves, got '
                f"{order!r}."
            )
    elif not isinstance(order, Sequence):
        raise ValueError(
            f'{owner}: `order` must be "reverse", "forward" or a sequence of leaf positions or '
            f"names, got {type(order).__name__}."
        )


def _leaf_positions(
    argument: str, leaves: Sequence[int | str], names: Sequence[str], *, whole: bool = False
) -> list[int]:
    """Leaves given by position or name, as positions.

    Args:
      argument: for messages.
      leaves: positions in flattening order, or names such as `"dense/kernel"`.
      names: of all leaves.
      whole: every leaf must be there, once.

    Raises:
      ValueError: a name or position that the tree does not have; with `whole`, leaves that are
        missing or named twice.
    """
    position = {name: i for i, name in enumerate(names)}
    found = []
    for leaf in leaves:
        i = position.get(leaf) if isinstance(leaf, str) else int(leaf)
        if i is None or not 0 <= i < len(names):
            raise ValueError(
                f"`{argument}` names leaf {leaf!r}, which the gradients do not have "
                f"({len(names)} leaves: {', '.join(names)})."
            )
        found.append(i)
    if whole and sorted(found) != list(range(len(names))):
        missing = [name for i, name in enumerate(names) if i not in found]
        twice = [name for i, name in enumerate(names) if found.count(i) > 1]
        raise ValueError(
            f"`{argument}` must name every gradient once: missing {missing}, more than once "
            f"{twice}."
        )
    return found
