"""Bucketed gradient all-reduce."""

from typing import Any, Literal, NamedTuple

import jax
import optax

from .._typing import AxisName, PyTree
from .._warn import warn_once
from ..collectives import all_mean
from ..mesh import axis_names, axis_size, checks_varying, require_axes, varying_axes
from ..tree import check_floating, leaf_names, plan_buffers
from ._base import check_axis_argument, check_no_weight

BUCKET_LIMITS = (2**20, 25 * 2**20)  # first bucket and the others, as in torch's reducer


class AllReduceGradientsState(NamedTuple):
    """State of `all_reduce_gradients`: empty, it remembers nothing between steps."""


def all_reduce_gradients(
    axis_name: AxisName,
    *,
    bucket_bytes: int = BUCKET_LIMITS[1],
    first_bucket_bytes: int = BUCKET_LIMITS[0],
    order: Literal["reverse", "forward"] = "reverse",
) -> optax.GradientTransformationExtraArgs:
    """Mean of the gradients over replicas, in flat buckets.

    The first transform of a chain. Gradients are packed, in reverse leaf order (roughly the order
    in which a backward pass finishes them), into flat buckets of one dtype each; a small first
    bucket lets communication start early.

    Args:
      axis_name: mapped axis to average over, or under shard_map a tuple of axes.
      bucket_bytes: a bucket closes when it reaches this size; 0 gives one bucket per leaf.
      first_bucket_bytes: size of the first bucket of each dtype.
      order: `"reverse"` or `"forward"` leaf order.

    Returns:
      A transform whose `update(grads, state, params=None)` returns the mean gradients, in the
      gradients' shapes and dtypes; state is empty. Works in half precision (float16 is divided
      before it is summed).

    Raises:
      ValueError: negative sizes or another order, at construction; at trace time an unbound axis,
        non-float leaves, a `weight`, and gradients that don't vary over `axis_name`. The last means
        that they are summed already: inside shard_map with its default check, jax sums gradients of
        parameters that are equal over an axis by itself.
      UserWarning: once, if the axis has size 1.

    Communication: every update, one all-reduce over `axis_name` per bucket; N bytes together, N the
      bytes of the gradients.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2 (bucketing).
    """
    owner = "all_reduce_gradients"
    check_axis_argument(owner, "axis_name", axis_name)
    for name, value in (
        ("bucket_bytes", bucket_bytes),
        ("first_bucket_bytes", first_bucket_bytes),
    ):
        if value < 0:
            raise ValueError(f"{owner}: `{name}` is a size in bytes and must be >= 0, got {value}.")
    if order not in ("reverse", "forward"):
        raise ValueError(f'{owner}: `order` must be "reverse" or "forward", got {order!r}.')
    warn = warn_once()

    def init_fn(params: PyTree) -> AllReduceGradientsState:
        del params
        return AllReduceGradientsState()

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        check_no_weight(owner, weight)
        require_axes(owner, "axis_name", axis_name)
        check_floating(owner, updates)
        _check_gradients_vary(owner, updates, axis_name)
        if axis_size(axis_name) == 1:
            warn(f"{owner}: axis {axis_name!r} has size 1, so there is nothing to reduce.")
        limits = (first_bucket_bytes, bucket_bytes)
        return mean_gradients(updates, axis_name, limits, reverse=order == "reverse"), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def mean_gradients(
    grads: PyTree,
    axis_name: AxisName,
    limits: tuple[int, ...] = BUCKET_LIMITS,
    *,
    reverse: bool = True,
) -> PyTree:
    """Mean of `grads` over `axis_name` in buckets that close at `limits` bytes.

    Communication: one all-reduce over `axis_name` per bucket.
    """
    plan = plan_buffers(grads, limits=limits, reverse=reverse)
    with jax.named_scope("all_reduce_gradients"):
        return plan.unpack([all_mean(flat, axis_name) for flat in plan.pack(grads)])


def _check_gradients_vary(owner: str, grads: PyTree, axis_name: AxisName) -> None:
    """Gradients that are equal over an axis by their type were summed over it already."""
    tracked = [name for name in axis_names(axis_name) if checks_varying(name)]
    wrong = [
        f"{leaf} (over {name!r})"
        for leaf, grad in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True)
        for name in tracked
        if name not in varying_axes(grad)
    ]
    if wrong:
        raise ValueError(
            f"{owner}: these gradients do not vary over the axis they should be averaged over, so "
            f"jax has summed them already: {', '.join(wrong)}. Make the parameters varying before "
            'differentiating: `jax.lax.pcast(params, axis_name, to="varying")`. '
            "(js.make_train_step does that, and averages over inner axes; pass it "
            "gradients=optax.identity() where a chain does so itself.)"
        )
