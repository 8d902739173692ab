"""Low precision: a policy of dtypes, and a loss scale whose optimizer skips overflowed updates."""

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import checked_int, records_settings
from .._support.scopes import LOSS_SCALE
from .._support.types import AxisName, PyTree
from ..mesh import axis_names, max_over, require_axes
from ..tracing import FullLoss, collective_axes
from ..transform import (
    GradientTransform,
    ParameterTransform,
    WrapperReduction,
    check_axis_argument,
    check_weight,
    checked_optax,
    holds_state,
    increment,
    known_states,
    persistent_leaves,
    spec_of,
)
from ..tree import all_finite, at_least_float32, cast, parts_of, zero_unless
from ._leaves import is_number, unscale

_OWNER = "dynamic_loss_scale"
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Policy:
    """The dtype in which a loss function computes, whatever dtypes parameters and batch have.

    `js.make_train_step(policy=js.gradients.Policy("bfloat16"))` gives the loss function parameters
    and batch in bfloat16. Parameters stay as they are: gradients arrive in their dtypes, and the
    optimizer works on float32 master weights. Results are at least float32. With `"float16"` put
    `js.dynamic_loss_scale` around `optimizer`: without it a step issues a `UserWarning` once.

    Attributes:
      compute: dtype of floating leaves: `"float32"`, `"bfloat16"` or `"float16"`.
      keep: names of leaves, or of the subtrees that hold them, that are not cast, in the parameters
        and in the batch: paths such as `"decoder/norm"`, or patterns such as `"*/norm"`, in which
        `*` matches anything. The step raises an error for a name that neither has.

    Raises:
      ValueError: another dtype.
    """

    compute: str = "float32"
    _: KW_ONLY
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for another dtype."""
        compute = self.compute
        name = compute if isinstance(compute, str) else jnp.dtype(compute).name
        if name not in COMPUTE_DTYPES:
            raise ValueError(
                f"Policy: `compute` must be one of {COMPUTE_DTYPES}, got {self.compute!r}."
            )
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "compute", name)
        object.__setattr__(self, "keep", keep)

    def cast(self, tree: PyTree) -> PyTree:
        """Return `tree` with its real floating leaves in `compute`, except those in `keep`."""
        dtype = jnp.dtype(self.compute)

        def one(path: Any, x: Any) -> Any:
            if not _is_real(x) or any(_matches(path, name) for name in self.keep):
                return x
            return cast(jnp.asarray(x), dtype)

        return jax.tree_util.tree_map_with_path(one, tree)

    def check_names(self, *trees: PyTree) -> None:
        """Raise `ValueError` for names in `keep` that none of the trees has."""
        paths = [path for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for name in self.keep:
            if not any(_matches(path, name) for path in paths):
                raise ValueError(
                    "Policy: `keep` must name leaves of parameters or batch, or subtrees, got "
                    f"{name!r}; leaves are {', '.join(map(_name, paths))}."
                )


def apply_policy(policy: Policy, loss: FullLoss) -> FullLoss:
    """Return a loss function that computes `loss` in the dtypes of `policy`.

    Model state is not cast, and is returned in the dtypes that it had. Loss and floating metrics
    are at least float32. Other arguments of the loss are cast as the batch is.
    """

    def full(params: PyTree, batch: PyTree, *, rng: jax.Array, model_state: PyTree, **extra: Any):
        policy.check_names(params, batch, extra)
        value, (metrics, after) = loss(
            policy.cast(params),
            policy.cast(batch),
            rng=rng,
            model_state=model_state,
            **policy.cast(extra),
        )
        value, metrics = jax.tree.map(_widen, (value, metrics))
        return value, (metrics, after)

    return full


def _matches(path: Any, name: str) -> bool:
    return any(fnmatchcase(_name(path[:n]), name) for n in range(1, len(path) + 1))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _widen(x: Any) -> Any:
    return cast(jnp.asarray(x), at_least_float32(jnp.result_type(x))) if _is_real(x) else x


# The scale in the state of an optimizer.


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array  # () float32, by which to multiply the next loss
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has
    skipped: jax.Array  # () int32, updates so far that were skipped
    skipped_last: jax.Array  # () bool, whether the last one was
    inner: PyTree  # state of the wrapped optimizer


def scale_state(opt_state: PyTree) -> DynamicLossScaleState | None:
    """Return the `dynamic_loss_scale` state in the state of an optimizer; None without one.

    Raises:
      ValueError: there are several.
    """
    parts = parts_of(opt_state, DynamicLossScaleState)
    if len(parts) > 1:
        raise ValueError(
            f"{_OWNER}: an optimizer must hold one loss scale, around the whole, such as "
            f"an optax.partition of optimizers, got {len(parts)}."
        )
    return parts[0] if parts else None


def scale_metrics(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
    """Return metrics of an update: the loss scale that it used, the updates skipped so far.

    Args:
      before: state of the optimizer before the update; it may have no loss scale.
      after: state of the optimizer after the update.
    """
    old, new = scale_state(before), scale_state(after)
    if old is None or new is None:
        return {}
    return {
        "loss_scale": old.loss_scale,
        "skipped_updates": new.skipped.astype(old.loss_scale.dtype),
    }


def did_skip(before: PyTree, after: PyTree) -> jax.Array | None:
    """Return whether an update was skipped, () bool; None without a loss scale.

    `skipped_last` would be wrong where `js.gradients.accumulate` wraps the loss scale: it does not
    change in updates that only add up.

    Args:
      before: state of the optimizer before the update.
      after: state of the optimizer after the update.
    """
    old, new = scale_state(before), scale_state(after)
    return None if old is None or new is None else new.skipped != old.skipped


def check_nesting(opt_state: PyTree) -> None:
    """Raise `ValueError` for a loss scale inside of a wrapper that defeats it, or for several."""
    scale_state(opt_state)
    for x, wrapper in known_states(opt_state):
        if wrapper.around_scale and parts_of(tuple(x), DynamicLossScaleState):
            raise ValueError(
                f"{_OWNER}: must not be in {wrapper.name}, {wrapper.around_scale}: put that "
                "inside of it."
            )


def loss_scale_of(opt_state: PyTree) -> jax.Array | None:
    """Return the number to multiply the next loss by: the scale of `js.dynamic_loss_scale`.

    `js.make_train_step` multiplies by it. In your own loop:

        scale = js.loss_scale_of(opt_state)
        grads = jax.grad(lambda p: loss_fn(p, batch).astype(jnp.float32) * scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: state of any optax transform; the scale may be inside of wrappers and chains.

    Returns:
      The scale, () float32, or (replicas,) of a stacked state; None without a loss scale.

    Raises:
      ValueError: several loss scales.

    Communication: none.
    """
    state = scale_state(opt_state)
    return None if state is None else state.loss_scale


# Overflows.


def any_over(flag: jax.Array, axes: Iterable[str], weight: jax.Array | None) -> jax.Array:
    """Return whether `flag`, () bool, is True on some device along `axes`.

    Args:
      flag: value on this device.
      axes: mapped axes; without any the result is `flag`.
      weight: this replica's share, (). If some replica along `axes` has a weight above 0, those of
        weight 0, whose batch may hold anything, do not count; otherwise all count.

    Communication: one all-reduce (max) of 4 bytes over `axes`, if they have several positions.
    """
    names = tuple(sorted(axes))
    if not names:
        return flag
    code = flag.astype(jnp.int32)
    if weight is not None:
        # In the maximum a replica with weight outranks all without; the lowest bit is the flag.
        code = code + 2 * (weight > 0).astype(jnp.int32)
    with jax.named_scope(LOSS_SCALE):
        return max_over(code, names) % 2 == 1


def zero_if(overflow: jax.Array, tree: PyTree) -> PyTree:
    """Return `tree`, with zeros for all its numbers where `overflow`, () bool, is True."""
    keep = ~overflow
    return jax.tree.map(lambda x: zero_unless(keep, jnp.asarray(x)) if is_number(x) else x, tree)


def revert_if(overflow: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `old` where `overflow`, () bool, is True, else `new`, in the dtypes of `new`."""

    def one(n: Any, o: Any) -> jax.Array:
        return jnp.where(overflow, cast(jnp.asarray(o), jnp.asarray(n).dtype), n)

    return jax.tree.map(one, new, old)


Update = Callable[..., tuple[PyTree, PyTree]]


def guard_overflow(update: Update, axes: Iterable[str], weight: jax.Array | None) -> Update:
    """Return `update` so that it keeps overflows out of what it remembers and sends.

    A hook with error feedback would keep a NaN for ever. If one device along `axes` has an
    overflow, all get NaN as the mean, which makes a loss scale skip the update. Counters in the
    state still advance; its other numbers stay as they were.

    Args:
      update: update function of a gradient transform, `(grads, state, params)`.
      axes: mapped axes over which it reduces.
      weight: see `any_over`.

    Communication: the collectives of `update`, and of `any_over` if the state of `update` holds
      numbers.
    """

    def guarded_update(grads: PyTree, state: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        if not any(map(is_number, persistent_leaves(state))):
            return update(grads, state, *rest)
        overflow = any_over(~all_finite(grads), axes, weight)
        means, after = update(zero_if(overflow, grads), state, *rest)
        after = jax.tree.map(
            lambda n, o: jnp.where(overflow, o, n) if is_number(n) else n, after, state
        )
        means = jax.tree.map(
            lambda g: jnp.where(overflow, jnp.nan, g) if is_number(g) else g, means
        )
        return means, after

    return guarded_update


def scaled_value_and_grad(
    loss: Callable[..., Any], scale: jax.Array, *, divides: bool = True
) -> Callable[..., Any]:
    """Return `jax.value_and_grad(loss, has_aux=True)`, computed from the loss times a scale.

    The product is at least float32: it would soon be infinite in float16.

    Args:
      loss: function `(params, ...) -> (loss, aux)`.
      scale: () float.
      divides: whether gradients are divided by the scale again.
    """

    def scaled_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(*args, **kwargs)
        value = cast(value, at_least_float32(value.dtype))
        return value * cast(scale, value.dtype), (value, aux)

    def differentiate(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        (_, value_and_aux), grads = jax.value_and_grad(scaled_loss, has_aux=True)(*args, **kwargs)
        return value_and_aux, unscale(grads, scale) if divides else grads

    return differentiate


# The wrapper.


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


_AS_A_WHOLE = "Leave out axes over which the compiler shards."


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
                f"{_OWNER}: must go around optax.masked and optax.partition, got parameters that "
                "these hide, whose gradients would stay scaled."
            )
        inner_state = inner.init(params)
        if holds_state(inner_state, "parameters"):
            raise ValueError(_moves_parameters("a chain that holds a parameter transform"))
        if scale_state(inner_state) is not None:
            raise ValueError(f"{_OWNER}: `optimizer` must not hold another js.dynamic_loss_scale.")
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
        f"{_OWNER}: `optimizer` must not hold {kind}: pass it as `sync`, or as in "
        "js.chain(js.dynamic_loss_scale(...), js.local_sgd(...))."
    )
