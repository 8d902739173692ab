"""A loss scale that follows overflows; it wraps an optimizer and skips overflowed updates."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._support.checks import checked_int
from ..._support.settings import records_settings
from ..._support.types import AxisName, PyTree
from ...mesh import axis_names, require_axes
from ...tracing import collective_axes
from ...transform import (
    GradientTransform,
    ParameterTransform,
    WrapperReduction,
    check_axis_argument,
    check_weight,
    checked_optax,
    holds_state,
    increment,
    spec_of,
)
from ...tree import all_finite, parts_of
from .._leaves import unscale
from ._mixed_precision import (
    DynamicLossScaleState,
    any_over,
    revert_if,
    scale_state,
    zero_if,
)

_OWNER = "dynamic_loss_scale"


@dataclass(frozen=True)
class ScaleRule:
    """The arguments of `dynamic_loss_scale` that control the scale; see there."""

    initial: float
    growth_interval: int
    growth: float
    backoff: float
    hysteresis: int
    min_scale: float
    max_scale: float

    def __post_init__(self) -> None:
        """Raise `ValueError` for numbers that let the scale fall to 0, rise to infinity or stay."""
        for name in ("growth_interval", "hysteresis"):
            number = checked_int(f"{_OWNER}: `{name}`", getattr(self, name), 1)
            object.__setattr__(self, name, number)  # a plain int also for NumPy integers
        growth, least, most = self.growth, self.min_scale, self.max_scale
        tiny, huge = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
        bounds = f"between `min_scale`={least} and `max_scale`={most}"
        for name, holds, rule in (
            ("growth", 1 < growth < math.inf, "> 1 and finite"),
            ("backoff", 0 < self.backoff < 1, "in (0, 1)"),
            ("min_scale", least >= tiny, f"> 0 in float32, {tiny:g} at least"),
            # One growth may exceed `max_scale`, but must not overflow float32.
            ("max_scale", most * growth <= huge, f"finite in float32 times `growth`={growth}"),
            ("initial", least <= self.initial <= most, bounds),
        ):
            if not holds:
                raise ValueError(f"{_OWNER}: `{name}` must be {rule}, got {getattr(self, name)}.")

    def init_state(self, inner: PyTree) -> DynamicLossScaleState:
        """Return the state before the first update, with that of the wrapped optimizer."""
        return DynamicLossScaleState(
            loss_scale=jnp.asarray(self.initial, jnp.float32),
            growth_count=jnp.zeros([], jnp.int32),
            hysteresis_left=jnp.asarray(self.hysteresis, jnp.int32),
            skipped=jnp.zeros([], jnp.int32),
            skipped_last=jnp.zeros([], bool),
            inner=inner,
        )

    def next_state(self, state: DynamicLossScaleState, skip: jax.Array) -> DynamicLossScaleState:
        """Return the state after an update; `skip`, () bool, says whether it overflowed."""
        scale, left = state.loss_scale, jnp.maximum(state.hysteresis_left - 1, 0)
        fallen = jnp.maximum(scale * jnp.float32(self.backoff), jnp.float32(self.min_scale))
        # `left` stays 0 after an overflow: the next overflow lowers the scale at once.
        after_overflow = jnp.where(left <= 0, fallen, scale), jnp.zeros_like(left), left
        count = state.growth_count + 1
        grows = count >= self.growth_interval
        risen = jnp.where(
            scale < jnp.float32(self.max_scale), scale * jnp.float32(self.growth), scale
        )
        otherwise = (
            jnp.where(grows, risen, scale),
            jnp.where(grows, 0, count),
            jnp.where(grows, jnp.int32(self.hysteresis), state.hysteresis_left),
        )
        return DynamicLossScaleState(
            *jax.tree.map(lambda a, b: jnp.where(skip, a, b), after_overflow, otherwise),
            skipped=jnp.where(skip, increment(state.skipped), state.skipped),
            skipped_last=skip,
            inner=state.inner,
        )


_AS_A_WHOLE = (
    "Axes over which the compiler shards are not mapped: leave them out, since gradients are "
    "checked as a whole there."
)


@records_settings
def dynamic_loss_scale(
    optimizer: optax.GradientTransformation,
    axes: AxisName | tuple[()] = (),
    *,
    initial: float = 2.0**16,
    growth_interval: int = 2000,
    growth: float = 2.0,
    backoff: float = 0.5,
    hysteresis: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> GradientTransform:
    """Add a loss scale to an optimizer, and skip updates with NaN or infinite gradients.

    float16 has no numbers between 0 and 6e-8: multiplying the loss by a scale keeps gradients above
    that. The wrapper divides the gradients by the scale, and lowers the scale when they overflow:

        optimizer = js.dynamic_loss_scale(optax.adamw(1e-3))
        step = js.make_train_step(loss_fn, optimizer, policy=js.gradients.Policy("float16"), ...)

    `js.make_train_step` multiplies the loss; your own loop does it with `js.loss_scale_of`. A
    skipped update is zeros, and does not change the state of `optimizer`. More, and what may be
    inside and around it: [docs/api/precision.md](#details).

    Args:
      optimizer: any optax transform except a parameter transform.
      axes: mapped axes, a name or a tuple, along which all skip an update together.
      initial: the first scale.
      growth_interval: number of updates in a row without overflow after which the scale grows.
      growth: factor > 1 by which the scale grows, unless it is at least `max_scale` already.
      backoff: factor in (0, 1) by which an overflow lowers the scale, not below `min_scale`.
      hysteresis: number of overflows until the scale falls; then every further overflow lowers it.
      min_scale: lower bound of the scale, > 0.
      max_scale: upper bound of the scale, >= `initial`; one growth from below may exceed it.

    Returns:
      A transform with state `DynamicLossScaleState`. Its `update(grads, state, params, weight=None,
      finite=None, unscaled=False)` takes gradients of the scaled loss.

    Raises:
      ValueError: numbers out of these bounds, invalid axes, an `optimizer` that is no transform, or
        holds a parameter transform or another loss scale; at trace time an axis that is not mapped.

    Communication: every update, one all-reduce (max) of 4 bytes over `axes` and those over which
      `optimizer` exchanges, none without axes; then that of `optimizer`, also in skipped updates.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; torch's
      `GradScaler` (the defaults), ColossalAI's `DynamicGradScaler` (the full rule).
    """
    rule = ScaleRule(initial, growth_interval, growth, backoff, hysteresis, min_scale, max_scale)
    if axes != ():
        check_axis_argument(_OWNER, "axes", axes)
    if isinstance(optimizer, ParameterTransform):
        raise ValueError(_moves_parameters("a js.ParameterTransform"))
    inner, names = checked_optax(_OWNER, "optimizer", optimizer), axis_names(axes)

    def init_fn(params: PyTree) -> DynamicLossScaleState:
        if parts_of(params, optax.MaskedNode):
            raise ValueError(
                f"{_OWNER}: must go around optax.masked and optax.partition, got parameters of "
                "which these hide some: the gradients of those would stay scaled."
            )
        inner_state = inner.init(params)
        if holds_state(inner_state, "parameters"):
            raise ValueError(_moves_parameters("a chain that holds a parameter transform"))
        if scale_state(inner_state) is not None:
            raise ValueError(
                f"{_OWNER}: `optimizer` must not hold another js.dynamic_loss_scale, got one: "
                "gradients would be divided twice."
            )
        return rule.init_state(inner_state)

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        finite: Any = None,
        unscaled: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        require_axes(_OWNER, "axes", names, _AS_A_WHOLE)
        share = check_weight(_OWNER, weight)
        overflow_here = ~all_finite(updates)
        if finite is not None:
            overflow_here = overflow_here | ~jnp.all(jnp.asarray(finite, bool))
        if weight is not None:
            extra["weight"] = weight
        grads = updates if unscaled else unscale(updates, state.loss_scale)
        if "grad" in extra and not unscaled:
            extra["grad"] = unscale(extra["grad"], state.loss_scale)

        def update(grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return inner.update(grads, state, params, **extra)

        run = jax.jit(update, inline=True)
        # Positions along the axes of the inner collectives must skip together: if one skipped
        # alone, a conditional on its counter could leave the others waiting in a collective.
        inner_axes = collective_axes(run.trace(grads, state.inner).jaxpr)
        skip = any_over(overflow_here, {*names, *inner_axes}, share)
        # Zeros, not a conditional: all devices must take part in the collectives of `optimizer`,
        # and no infinite or NaN number may be sent.
        new_updates, inner_state = run(zero_if(skip, grads), state.inner)
        new = rule.next_state(state, skip)._replace(inner=revert_if(skip, inner_state, state.inner))
        return zero_if(skip, new_updates), new

    takes = {"weight", "finite", "unscaled"}
    flags = {"skips": True, "returns_updates": True, "of_rows": False}
    return GradientTransform(
        init_fn, update_fn, WrapperReduction.from_parts(spec_of(inner), takes=takes, **flags)
    )


def _moves_parameters(kind: str) -> str:
    return (
        f"{_OWNER}: `optimizer` must leave parameters to other transforms, got {kind}. In a "
        "skipped update its counter would not advance, and replicas would be out of phase: pass it "
        "as `sync`, or in js.chain(js.dynamic_loss_scale(...), js.local_sgd(...))."
    )
