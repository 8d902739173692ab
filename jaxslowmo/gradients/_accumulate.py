"""A wrapper that adds up the gradients of several calls and makes one update of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import records_settings
from .._support.types import PyTree
from ..mesh import vary_over
from ..transform import (
    Communicate,
    Every,
    GradientTransform,
    WrapperReduction,
    as_schedule,
    check_weight,
    checked_optax,
    increment,
    run_if,
    spec_of,
)
from ..tree import WeightedSum, at_least_float32, cast, check_floating, zeros_like

_OWNER = "accumulate"


class AccumulateState(NamedTuple):
    """State of `accumulate`."""

    count: jax.Array  # () int32, calls so far; equal on all replicas
    total: PyTree  # like the gradients, at least float32: weighted sum since the last update
    weight: jax.Array  # () float32, sum of weights since the last update; without weights, of calls
    inner: PyTree  # state of the wrapped transform


@records_settings
def accumulate(
    inner: optax.GradientTransformation, every: int | Every, *, average: bool = True
) -> GradientTransform:
    """Collect gradients over several calls without communication, then run `inner` on their mean.

    This is torch's `no_sync`, for loops of your own. Wrap the chain that reduces gradients and
    updates parameters:

        tx = js.chain(js.all_reduce_gradients("replica"), optax.adamw(1e-3))
        tx = js.gradients.accumulate(tx, every=4)

    A step of `js.make_train_step` refuses it, since it adds up gradients itself: `accumulate=` of
    the step or of `js.train_loop`, or `step.collect`. `optax.MultiSteps` (0.2.8) runs what is
    inside of it in every call, so that a reduction there sends k times the bytes.

    Args:
      inner: transform of the gradients that were collected since its last call. A `js.chain` says
        over which axes it reduces; of an `optax.chain` this is unknown, and under `vmap` a call
        that only collects may then compute the update, too.
      every: number of calls per update, or `js.every(...)` on the number of the call.
      average: whether `inner` receives the mean of the calls. False passes the sum, as in torch,
        where users scale the loss themselves.

    Returns:
      A transform with state `AccumulateState`. `update(grads, state, params, weight=None,
      step=None)` returns zeros in calls that only collect. `weight` is this call's weight in the
      mean, and `inner` receives their sum as its `weight`; other extra arguments reach `inner` as
      they are. `step` replaces `every`: whether this call updates, a bool, or a () bool array that
      is equal on all replicas.

    Raises:
      ValueError: at construction: `every` < 1, `inner` that is no transform. At trace time: a
        weight with average=False, non-float leaves.

    Communication: that of `inner`, in calls that update; nothing in others.

    Source: torch 2.13, `DistributedDataParallel.no_sync`.
    """
    schedule = as_schedule(every, "every")
    transform = checked_optax(_OWNER, "inner", inner)

    def init_fn(params: PyTree) -> AccumulateState:
        check_floating(_OWNER, params)
        wide_zeros = lambda p: jnp.zeros_like(p, dtype=at_least_float32(p.dtype))  # noqa: E731
        sums = jax.tree.map(wide_zeros, params), jnp.zeros([], jnp.float32)
        # Gradients differ over the axes that `inner` reduces over, even if parameters do not.
        total, weight = vary_over(sums, spec.axes)
        return AccumulateState(jnp.zeros([], jnp.int32), total, weight, transform.init(params))

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        step: bool | jax.Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        check_floating(_OWNER, updates)
        share = check_weight(_OWNER, weight)
        if share is not None and not average:
            raise ValueError(f"{_OWNER}: `weight` needs average=True, got average=False.")
        count = increment(state.count)
        sums = WeightedSum(state.total, state.weight) + WeightedSum.from_value(updates, share)
        state = AccumulateState(count, sums.sum, sums.weight, state.inner)

        @partial(jax.jit, inline=True)  # traced once for both branches; it adds no call
        def update(s: AccumulateState) -> tuple[PyTree, AccumulateState]:
            whole = WeightedSum(s.total, s.weight).mean if average else s.total
            whole = jax.tree.map(lambda t, g: cast(t, g.dtype), whole, updates)
            arguments = extra if share is None else {**extra, "weight": s.weight}
            new_updates, after = transform.update(whole, s.inner, params, **arguments)
            empty = jax.tree.map(jnp.zeros_like, s.total)
            return new_updates, AccumulateState(count, empty, jnp.zeros_like(s.weight), after)

        def collect(s: AccumulateState) -> tuple[PyTree, AccumulateState]:
            return jax.tree.map(zeros_like, jax.eval_shape(update, s)[0]), s

        due = schedule(count) if step is None else step
        return run_if(due, update, collect, state, axes=spec.axes)

    spec = _AccumulateSpec.from_parts(
        spec_of(inner), takes={"weight"}, of_rows=False, schedule=schedule
    )
    return GradientTransform(init_fn, update_fn, spec)


@dataclass(frozen=True, kw_only=True, eq=False)
class _AccumulateSpec(WrapperReduction):
    """The description of `accumulate`, which calls a transform by a schedule."""

    schedule: Every

    def calls(self, state: PyTree) -> Sequence[Communicate]:
        return [self.schedule(increment(state.count))]
