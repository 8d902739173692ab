"""A loss scale that follows overflows; it wraps an optimizer and skips overflowed updates."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._support.checks import checked_int
from ..._support.settings import records_settings
from ..._support.types import AxisName, PyTree
from ...mesh import axes_of, axis_names, match_varying, require_axes, vary_over
from ...tracing import axes_sent_over, collective_axes
from ...transform import (
    Around,
    GradientTransform,
    ParameterTransform,
    check_axis_argument,
    check_weight,
    checked_optax,
    holds_state,
    increment,
    spec_of,
)
from ...tree import parts_of
from ._mixed_precision import (
    DynamicLossScaleState,
    anywhere,
    as_before_if,
    divided,
    overflowed,
    scale_state,
    zero_if,
)

_OWNER = "dynamic_loss_scale"


class Scale(NamedTuple):
    """The scale and the counters that `ScaleRule` keeps from update to update."""

    scale: jax.Array  # () float32, by which the loss is multiplied
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has


@dataclass(frozen=True, kw_only=True)
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
        for name in ("initial", "growth", "backoff", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(f"{_OWNER}: `{name}` must be a number, got {value!r}.")
        tiny, huge = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
        least, most, growth = self.min_scale, self.max_scale, self.growth
        between = f"`min_scale`={least} and `max_scale`={most}"
        for holds, rule, value in (
            (1 < growth < math.inf, "`growth` must be > 1 and finite", growth),
            (0 < self.backoff < 1, "`backoff` must be in (0, 1)", self.backoff),
            (least >= tiny, f"`min_scale` must be > 0 in float32, {tiny:g} at least", least),
            # One growth may exceed `max_scale`, but must not overflow float32.
            (
                most * growth <= huge,
                "`max_scale` * `growth` must be finite in float32",
                f"{most} * {growth}",
            ),
            (least <= self.initial <= most, f"`initial` must be between {between}", self.initial),
        ):
            if not holds:
                raise ValueError(f"{_OWNER}: {rule}, got {value}.")

    def start(self) -> Scale:
        """Return the scale and the counters before the first update."""
        return Scale(
            jnp.asarray(self.initial, jnp.float32),
            jnp.zeros([], jnp.int32),
            jnp.asarray(self.hysteresis, jnp.int32),
        )

    def after(self, old: Scale, overflow: jax.Array) -> Scale:
        """Return the scale after an update; `overflow`, () bool, says whether it overflowed."""
        left = jnp.maximum(old.hysteresis_left - 1, 0)
        fallen = jnp.maximum(old.scale * jnp.float32(self.backoff), jnp.float32(self.min_scale))
        # `left` stays 0 after an overflow: the next overflow lowers the scale at once.
        after_overflow = Scale(
            jnp.where(left <= 0, fallen, old.scale), jnp.zeros_like(old.growth_count), left
        )
        count = old.growth_count + 1
        grows = count >= self.growth_interval
        risen = jnp.where(
            old.scale < jnp.float32(self.max_scale), old.scale * jnp.float32(self.growth), old.scale
        )
        otherwise = Scale(
            jnp.where(grows, risen, old.scale),
            jnp.where(grows, 0, count),
            jnp.where(grows, jnp.int32(self.hysteresis), old.hysteresis_left),
        )
        return jax.tree.map(lambda a, b: jnp.where(overflow, a, b), after_overflow, otherwise)


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
    """Keep a scale for the loss, and skip updates in which a gradient is infinite or NaN.

    float16 has no numbers between 0 and 6e-8: multiplying the loss by a scale keeps gradients above
    that. The wrapper divides the gradients by the scale, and lowers the scale when they overflow:

        optimizer = js.dynamic_loss_scale(optax.adamw(1e-3))
        step = js.make_train_step(loss_fn, optimizer, policy=js.Policy("float16"), ...)

    `js.make_train_step` reads the scale from the state and multiplies the loss; your own loop does
    it with `js.loss_scale_of`. In a skipped update all updates are zeros and the state of
    `optimizer` does not change, not even its counters. A parameter transform after it still counts
    the update and exchanges what is due, so replicas stay in phase though one of them skips.

    Wrap it around everything that reads gradients: clipping, weight decay, `optax.partition`,
    `optax.MultiSteps` and `js.accumulate` may be inside. `js.accumulate` may also wrap it (then a
    whole window is skipped), and a transform that averages gradients may precede it. Any other
    transform before it receives scaled gradients in your own loop, but unscaled ones in a step of
    `js.make_train_step`, if `js.chain` or another wrapper of jaxslowmo holds the loss scale (not
    `optax.chain`). Do not wrap it in `optax.apply_if_finite`, which would hide every overflow from
    it, or in `optax.MultiSteps`, whose sum stays NaN after an overflow.

    Args:
      optimizer: any optax transform except a parameter transform.
      axes: mapped axes, a name or a tuple, whose positions skip updates together because each
        holds a part of one model, such as the stages of a pipeline. With the axis of the replicas
        these skip together, too; without it each replica has its own scale. Axes over which the
        compiler shards are not mapped; the gradients of all shards are checked anyway. Axes over
        which `optimizer` itself exchanges gradients are added.
      initial: the first scale.
      growth_interval: number of updates in a row without overflow after which the scale grows.
      growth: factor > 1 by which the scale grows, unless it is at least `max_scale` already.
      backoff: factor in (0, 1) by which an overflow lowers the scale, not below `min_scale`.
      hysteresis: number of overflows until the scale falls; then every further overflow lowers it,
        until it has grown (or would have).
      min_scale: lower bound of the scale, > 0.
      max_scale: upper bound of the scale, >= `initial`; one growth from below may exceed it.

    Returns:
      A transform with state `DynamicLossScaleState`. `update(grads, state, params, weight=None,
      finite=None, unscaled=False)` takes gradients of the scaled loss and passes those of the loss
      to `optimizer`, divided in at least float32, in the gradients' dtypes (float16 gradients then
      lose what the scale has kept: use float32 parameters). `finite`: () bool, False skips the
      update, for example because of gradients that are not among `grads`. `unscaled=True`: the
      gradients were divided already. `weight`: this replica's share; a replica of weight 0 is not
      checked if another one along `axes` has a share. These, a `grad` (divided as the gradients
      are) and other arguments reach `optimizer`; `value` and `value_fn` must be those of the
      unscaled loss.

    Raises:
      ValueError: at construction: numbers outside of these bounds, `optimizer` that is no transform
        or a parameter transform, axes that are no names. At `init`: an `optimizer` that holds a
        parameter transform or another loss scale; parameters of which a wrapping `optax.masked` or
        `optax.partition` hides some. At trace time: an axis that is not mapped, a `finite` that is
        no () bool.

    Communication: every update, one all-reduce (max) of 4 bytes over `axes` and those over which
      `optimizer` exchanges, none without axes; then that of `optimizer`, also in skipped updates.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. Defaults up to
      `backoff` are those of torch's `GradScaler`, which has neither hysteresis nor bounds; the
      other defaults keep its behaviour. The full rule is that of ColossalAI's `DynamicGradScaler`.
    """
    rule = ScaleRule(
        initial=initial,
        growth_interval=growth_interval,
        growth=growth,
        backoff=backoff,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    if axes != ():
        check_axis_argument(_OWNER, "axes", axes)
    if isinstance(optimizer, ParameterTransform):
        raise ValueError(_moves_parameters("a js.ParameterTransform"))
    inner = checked_optax(_OWNER, "optimizer", optimizer)
    return _LossScale(inner, axis_names(axes), rule).transform()


@dataclass(frozen=True)
class _LossScale:
    """The transform `dynamic_loss_scale` that wraps `inner`."""

    inner: optax.GradientTransformationExtraArgs
    axes: tuple[str, ...]
    rule: ScaleRule

    def transform(self) -> GradientTransform:
        spec = Around.of(
            spec_of(self.inner),
            takes={"weight", "finite", "unscaled"},
            skips=True,
            returns_updates=True,
            of_rows=False,
        )
        return GradientTransform(self._init, self._update, spec)

    def _init(self, params: PyTree) -> DynamicLossScaleState:
        if parts_of(params, optax.MaskedNode):
            raise ValueError(
                f"{_OWNER}: must go around optax.masked and optax.partition, got parameters of "
                "which these hide some: the gradients of those would stay scaled."
            )
        inner = self.inner.init(params)
        if holds_state(inner, "parameters"):
            raise ValueError(_moves_parameters("a chain that holds a parameter transform"))
        if scale_state(inner) is not None:
            raise ValueError(
                f"{_OWNER}: `optimizer` must not hold another js.dynamic_loss_scale, got one: "
                "gradients would be divided twice."
            )
        skipped = jnp.zeros([], jnp.int32), jnp.zeros([], bool)
        start = DynamicLossScaleState(*self.rule.start(), *skipped, inner)
        # Typed as after an update: that is equal over the axes on which all positions skip
        # together.
        varying = axes_of(params) - set(self.axes)
        return vary_over(
            start, varying and varying - axes_sent_over(self.inner.update, params, inner, params)
        )

    def _program(
        self, grads: PyTree, state: PyTree, params: PyTree | None, extra: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """Return the optimizer's update of gradients and state, and the axes it communicates over.

        Positions along these axes must skip together: if one skipped alone, a conditional on its
        counter could leave the others waiting in a collective.
        """

        def update(grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return self.inner.update(grads, state, params, **extra)

        program = jax.jit(update, inline=True)
        return program, collective_axes(program.trace(grads, state).jaxpr)

    def _update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        finite: Any = None,
        unscaled: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        require_axes(_OWNER, "axes", self.axes, _AS_A_WHOLE)
        share = check_weight(_OWNER, weight)
        overflow_here = overflowed(updates)
        if finite is not None:
            overflow_here = overflow_here | ~_as_flag(finite)
        if weight is not None:
            extra["weight"] = weight
        grads = updates if unscaled else divided(updates, state.loss_scale)
        if "grad" in extra and not unscaled:
            extra["grad"] = divided(extra["grad"], state.loss_scale)
        run, inner_axes = self._program(grads, state.inner, params, extra)
        skip = anywhere(overflow_here, {*self.axes, *inner_axes}, share)
        # Zeros, not a conditional: all devices must take part in the collectives of `optimizer`,
        # and no infinite or NaN number may be sent.
        new_updates, inner = run(zero_if(skip, grads), state.inner)
        new = DynamicLossScaleState(
            *self.rule.after(Scale(*state[:3]), skip),
            skipped=jnp.where(skip, increment(state.skipped), state.skipped),
            skipped_last=skip,
            inner=as_before_if(skip, inner, state.inner),
        )
        return zero_if(skip, new_updates), match_varying(new, state)


def _as_flag(finite: Any) -> jax.Array:
    is_bool = isinstance(finite, bool) or getattr(finite, "dtype", None) == np.bool_
    if not is_bool or np.shape(finite) != ():
        raise ValueError(
            f"{_OWNER}: `finite` must be a () bool, whether all other gradients are finite, got "
            f"{finite!r}."
        )
    return jnp.asarray(finite)


def _moves_parameters(kind: str) -> str:
    return (
        f"{_OWNER}: `optimizer` must leave parameters to other transforms, got {kind}. In a "
        "skipped update its counter would not advance, and replicas would be out of phase: pass it "
        "as `sync`, or in js.chain(js.dynamic_loss_scale(...), js.local_sgd(...))."
    )
