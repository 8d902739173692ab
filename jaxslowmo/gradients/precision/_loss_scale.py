"""A loss scale that follows overflows, around an optimizer that skips those updates."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..._support.checks import checked_int
from ..._support.types import AxisName, PyTree
from ...mesh import axes_of, axis_names, match_varying, require_axes, vary_over
from ...tracing import axes_sent_over, collective_axes
from ...transform import (
    GradientTransform,
    ParameterTransform,
    Validation,
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
    """What the rule remembers."""

    scale: jax.Array  # () float32, by which the loss is multiplied
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """The arguments of `dynamic_loss_scale` that decide about the scale; see there."""

    initial: float
    growth_interval: int
    growth: float
    backoff: float
    hysteresis: int
    min_scale: float
    max_scale: float

    def __post_init__(self) -> None:
        """Raise `ValueError` for what would let the scale fall to 0, rise to infinity or stay."""
        for name in ("growth_interval", "hysteresis"):
            number = checked_int(f"{_OWNER}: `{name}`", getattr(self, name), 1)
            object.__setattr__(self, name, number)  # as a plain int, whatever it was
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
            # One growth may lead beyond `max_scale`, and must not lead to infinity.
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
        """Before the first update."""
        return Scale(
            jnp.asarray(self.initial, jnp.float32),
            jnp.zeros([], jnp.int32),
            jnp.asarray(self.hysteresis, jnp.int32),
        )

    def after(self, old: Scale, overflow: jax.Array) -> Scale:
        """After an update with or without an overflow, a () bool array."""
        left = jnp.maximum(old.hysteresis_left - 1, 0)
        fallen = jnp.maximum(old.scale * jnp.float32(self.backoff), jnp.float32(self.min_scale))
        # Not restored by an overflow: the next one lowers the scale again, at once.
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
    "looked at as a whole there."
)


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
    """Keeps a scale for the loss, and skips updates of which a gradient is infinite or NaN.

    float16 holds nothing below 6e-8: gradients of a loss that is multiplied by the scale stay above
    that. The wrapper divides them by it again, and lowers it when they overflow:

        optimizer = js.dynamic_loss_scale(optax.adamw(1e-3))
        step = js.make_train_step(loss_fn, optimizer, policy=js.Policy("float16"), ...)

    `js.make_train_step` reads the scale from the state and multiplies the loss; a loop of your own
    does with `js.loss_scale_of`. In a skipped update all updates are zeros and the state of
    `optimizer` is as before, its counters too; a parameter transform behind it counts on and
    exchanges what is due, so replicas stay in phase though one of them skips.

    Put it around all that reads gradients: clipping, weight decay, `optax.partition`,
    `optax.MultiSteps` and `js.accumulate` may stand inside. `js.accumulate` may stand around it,
    too (then a whole window is skipped), and what averages gradients in front of it. What else
    stands in front gets gradients that are still scaled in a loop of your own, and that are not in
    a step of `js.make_train_step` that knows of it: where `js.chain` or a wrapper of ours holds it,
    and no `optax.chain`. Not around it: `optax.apply_if_finite`, which would keep every
    overflow from it, and `optax.MultiSteps`, whose sum stays NaN after one.

    Args:
      optimizer: any optax transform but a parameter transform.
      axes: mapped axes, a name or a tuple, over whose positions all skip together, since each holds
        a part of one model, such as the stages of a pipeline; with the axis of the replicas these
        skip together, too, and otherwise each has a scale of its own. Axes over which the compiler
        shards are not mapped, and the gradients of all shards are looked at anyway. Axes over
        which `optimizer` itself exchanges gradients are added.
      initial: the first scale.
      growth_interval: after so many updates in a row without overflow the scale grows.
      growth: factor > 1 by which it grows, unless it is `max_scale` already, or more.
      backoff: factor in (0, 1) by which an overflow lowers it, not below `min_scale`.
      hysteresis: of so many overflows the last one lowers the scale, and every one after that,
        until it has grown (or would have).
      min_scale: > 0.
      max_scale: >= `initial`; one growth from below may exceed it.

    Returns:
      A transform with state `DynamicLossScaleState`. `update(grads, state, params, weight=None,
      finite=None, unscaled=False)` takes gradients of the scaled loss and gives `optimizer` those
      of the loss, divided in at least float32, in the dtypes that they had (float16 gradients lose
      then what the scale has kept: let parameters be float32). `finite`: () bool, False skips, as
      gradients that are not among `grads` may want. `unscaled=True`: the gradients were divided
      already. `validation`: `js.make_train_step(validate="after")` says that the optimizer shall
      not wait for what other devices find. `weight`: this replica's share; where another one counts
      along `axes`, one of weight 0 is not asked. These, a `grad` that is divided as the gradients
      are, and other arguments reach `optimizer`; `value` and `value_fn` shall be of the loss that
      is not scaled.

    Raises:
      ValueError: numbers outside of these bounds, `optimizer` that is no transform or a parameter
        transform, axes that are no names, at construction. At `init` an `optimizer` that holds a
        parameter transform or another loss scale; parameters of which `optax.masked` or
        `optax.partition` around it hide some. At trace time an axis that is not mapped, a `finite`
        that is no () bool.

    Communication: every update, one all-reduce (max) of 4 bytes over `axes` and those over which
      `optimizer` exchanges, none where there are none; then that of `optimizer`, also in updates
      that are skipped.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. Defaults up to
      `backoff` are those of torch's `GradScaler`, which has no hysteresis and no bounds, as 1 and
      these; the rule with both is that of ColossalAI's `DynamicGradScaler`.
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
    """The transform around `inner`."""

    inner: optax.GradientTransformationExtraArgs
    axes: tuple[str, ...]
    rule: ScaleRule

    def transform(self) -> GradientTransform:
        own = spec_of(self.inner)
        spec = own.around(
            lambda state: state.inner,
            takes=own.takes | {"weight", "finite", "validation", "unscaled"},
            skips=True,
            returns_updates=True,
            of_rows=False,
        )
        return GradientTransform(self._init, self._update, spec)

    def _init(self, params: PyTree) -> DynamicLossScaleState:
        if parts_of(params, optax.MaskedNode):
            raise ValueError(
                f"{_OWNER}: must stand around optax.masked and optax.partition, got parameters of "
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
        # Typed as after an update, which chooses between two: what is asked for over an axis is
        # equal there.
        apart = axes_of(params) - set(self.axes)
        return vary_over(
            start, apart and apart - axes_sent_over(self.inner.update, params, inner, params)
        )

    def _program(
        self, grads: PyTree, state: PyTree, params: PyTree | None, extra: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """The optimizer's update of gradients and state, and the axes over which it sends.

        Positions along these must skip together: a conditional on a counter of one that skips alone
        would leave the others waiting.
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
        validation: Validation | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        require_axes(_OWNER, "axes", self.axes, _AS_A_WHOLE)
        share = check_weight(_OWNER, weight)
        found = overflowed(updates)
        if finite is not None:
            found = found | ~_as_flag(finite)
        if weight is not None:
            extra["weight"] = weight
        if validation is not None:
            extra["validation"] = validation
        grads = updates if unscaled else divided(updates, state.loss_scale)
        if "grad" in extra and not unscaled:
            extra["grad"] = divided(extra["grad"], state.loss_scale)
        run, inner_axes = self._program(grads, state.inner, params, extra)
        if validation is None or validation.skipped is None:
            skip = anywhere(found, {*self.axes, *inner_axes}, share)
        else:
            skip = validation.skipped

        def choose(made: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            moved, after = made
            return zero_if(skip, moved), as_before_if(skip, after, state.inner)

        if validation is None:
            # Zeros, not a conditional: what `optimizer` exchanges it exchanges on all devices, and
            # what is not finite does not travel.
            moved, inner = choose(run(zero_if(skip, grads), state.inner))
        else:
            # The optimizer's arithmetic shall be done before `skip` is known. The compiler would
            # make one loop of it and of a choice; what a conditional is given is there before it.
            made = run(grads, state.inner)
            like = jax.eval_shape(choose, made)
            moved, inner = lax.cond(skip, choose, lambda x: match_varying(x, like), made)
        new = DynamicLossScaleState(
            *self.rule.after(Scale(*state[:3]), skip),
            skipped=jnp.where(skip, increment(state.skipped), state.skipped),
            skipped_last=skip,
            inner=inner,
        )
        return moved, match_varying(new, state)


def _as_flag(finite: Any) -> jax.Array:
    is_bool = isinstance(finite, bool) or getattr(finite, "dtype", None) == np.bool_
    if not is_bool or np.shape(finite) != ():
        raise ValueError(
            f"{_OWNER}: `finite` must be a () bool, whether all other gradients are finite, got "
            f"{finite!r}."
        )
    return jnp.asarray(finite)


def _moves_parameters(what: str) -> str:
    return (
        f"{_OWNER}: `optimizer` must leave parameters to other transforms, got {what}. In a "
        "skipped update its counter would stand still, and replicas would be out of phase: pass it "
        "as `sync`, or in js.chain(js.dynamic_loss_scale(...), js.local_sgd(...))."
    )
