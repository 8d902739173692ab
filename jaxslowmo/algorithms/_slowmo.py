"""SlowMo: slow momentum over any base algorithm."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from .._support.checks import warn_once
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec
from ..mesh import match_varying
from ..transform import Every, ParameterTransform, as_schedule, checked_exchange
from .outer import ALONE, NO_RATE, Outer, OuterRate, shards_state

LearningRate = float | optax.Schedule | Literal["optimizer"] | None


class SlowMomentumState(NamedTuple):
    """State of `slow_momentum`.

    No field shares its name with a hyperparameter of optax, since
    `optax.tree.set(state, learning_rate=...)` sets every field of that name in a chain.
    """

    velocity: PyTree  # like the anchor, float32: v = gamma * m
    last_rate: jax.Array  # () float32, gamma of the last slow step; 1 before the first
    made_at: jax.Array  # () float32, gamma at which `velocity` was made (r); 0 before the first
    since: jax.Array  # () float32, largest gamma since the last slow step; 0 where not observed

    @property
    def learning_rate(self) -> jax.Array:
        """The value of `last_rate`, by the name that the field had in 0.1.0."""
        return self.last_rate


def slowmo(
    axis_name: AxisName,
    *,
    base: ParameterTransform | None = None,
    sync_every: int | Every = 48,
    momentum: float = 0.5,
    slow_learning_rate: float = 1.0,
    learning_rate: LearningRate = None,
    shard_state: bool | None = None,
    exact_average: bool = True,
    nesterov: bool = False,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> ParameterTransform:
    """Slow momentum on top of a base algorithm; comes last in a chain.

    Every `sync_every` updates, with D = anchor - average of the replicas' y = params + updates and
    gamma = `learning_rate` now:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_learning_rate * gamma * m

    and all parameters become the anchor, which starts as the initial parameters. In between `base`
    runs. FairScale's `memory_efficient=True` is `shard_state=True`, its `memory_efficient=False` is
    `exact_average=False`.

    Args:
      axis_name: mapped axis of the replicas.
      base: a `ParameterTransform` such as `js.local_sgd(...)`; None trains alone between slow steps
        (with a warning).
      sync_every: period of the slow step in updates, or `js.every(...)`.
      momentum: slow momentum in [0, 1). It, `slow_learning_rate` and `learning_rate` may also be
        traced scalars, for a sweep by `jax.vmap`; then their values are not checked.
      slow_learning_rate: step size of the outer step, >= 0.
      learning_rate: the inner learning rate gamma: a float >= 0, a schedule of the 0-based update
        count (the one given to the optimizer), or None for 1. "optimizer" reads it from the state
        of an `optax.inject_hyperparams` optimizer: `js.make_train_step` passes it on; in a loop of
        your own, `update(..., learning_rate=rate)` does. Derivatives with respect to that rate are
        those of one number that all replicas have.
      shard_state: keep 1/R of anchor and momentum on each replica. None: True where the average is
        exact and there is no codec. One replica's state is then not all of it
        (`flax.jax_utils.unreplicate`, `x[0]`): save the stacked state, or by
        `jaxslowmo.checkpoint`.
      exact_average: True averages y over the replicas in the slow step and skips the base's own
        exchange; False takes what `base` left on this replica (implies `shard_state=False`).
      nesterov: Nesterov form of the outer step.
      local_axis_name: axis of the devices inside a replica, which hold equal parameters: each then
        exchanges 1/L of them.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica, for a `base`
        without any, too; each device exchanges its own block, and anchor and momentum are split
        likewise.
      bucket_bytes: None exchanges one buffer (per exchange dtype), else buffers of about this size.
      codec: of the slow exchange (a base has its own): None is float32; `js.codecs.bfloat16()` or
        `float16()` send in 16 bits what a replica has moved, anchor - y, which is small. With error
        feedback params = anchor - (what of its own a replica did not send), which is part of what
        it sends in the next slow step; the mean is rounded in either case, so that this gains
        nothing. Needs an exact average and a whole anchor.

    Returns:
      A `ParameterTransform` with state `OuterState` whose `outer` is a `SlowMomentumState`. Anchor,
      momentum and, without a codec, the slow exchange are float32 (float64 for float64 leaves).
      Memory per replica: 2N/R sharded (padding apart), else 2N, N the bytes of the parameters in
      float32.

    Raises:
      ValueError: sync_every < 1, momentum outside [0, 1), negative or infinite rates,
        exact_average=False with shard_state=True or without a base, a `codec` that is none or comes
        with shard_state=True or exact_average=False, a plain optax transform or another slowmo as
        base; at trace time an unbound axis, missing params, non-float leaves,
        learning_rate="optimizer" without a rate.
      UserWarning: once, for sync_every that is no multiple of the base's, no base, an axis of size
        1.

    Communication: in a slow step over `axis_name`, sharded: one reduce-scatter and one all-gather
      of N bytes each (per buffer); unsharded: one all-reduce of N bytes (N / 2 with a
      codec); not exact: only the base's. In other updates the base's. With `local_axis_name` N / L
      per device, and all-gathers over that axis (of N/R before and N after the outer step when
      sharded). With
      learning_rate="optimizer" 8 bytes more, in an all-reduce: all take the largest rate of the
      replicas that have data (the optimizer of one that ran out has not counted on).

    Source: Wang et al., "SlowMo", ICLR 2020, algorithm 1; FairScale 0.4.13
      `SlowMoDistributedDataParallel`.
    """
    owner = "slowmo"
    exchange = checked_exchange(owner, axis_name, local_axis_name, param_specs, bucket_bytes, codec)
    schedule = as_schedule(sync_every)
    _check_base(base, schedule, exact_average)
    if shard_state and not exact_average:
        raise ValueError(
            "slowmo: `exact_average=False` keeps each replica's own anchor, which cannot be "
            "sharded; got shard_state=True. Leave `shard_state` out or set it to False."
        )
    base = ALONE if base is None else base
    # Wang et al., algorithm 1: tau steps of the base algorithm, the exact average (line 6), and the
    # slow momentum update (lines 7 and 8), which is the outer optimizer here.
    return Outer(
        owner,
        exchange,
        schedule,
        slow_momentum(momentum, slow_learning_rate, nesterov=nesterov),
        base=base if param_specs is None else base.with_specs(param_specs),
        exact_average=exact_average,
        shard_state=shards_state(owner, shard_state, exchange, exact_average=exact_average),
        rate=_outer_rate(learning_rate),
    ).transform()


def slow_momentum(
    momentum: float = 0.5, slow_learning_rate: float = 1.0, *, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Momentum on the displacement between slow steps.

    With D = anchor - average and gamma the inner learning rate now:

        m <- momentum * m + D / gamma
        anchor <- anchor - slow_learning_rate * gamma * m                              (plain)
        anchor <- anchor - slow_learning_rate * gamma * (momentum * m + D / gamma)     (nesterov)

    v = gamma * m is stored, its carried part rescaled by gamma_now / gamma_before (1 where
    gamma_before is 0), so a learning rate of 0 makes neither inf nor NaN.

    What is carried is momentum * (that factor) * v, and where the rate has grown again the product
    is at most gamma_now / r, r the rate at which v was made: the largest gamma since the slow step
    before, or momentum times the r of then, where that is more. So no displacement comes back
    larger than the rate now would have made it. Rates that only fall, or only grow, are not
    touched. A rate that falls to a small floor and restarts would diverge without: D, made at high
    rates, is divided by the floor, and would come back larger by peak / floor.

    Args:
      momentum: in [0, 1).
      slow_learning_rate: step size of the outer step, >= 0.
      nesterov: look ahead by one momentum step.

    Returns:
      An optax transform: `update(D, state, anchor, learning_rate=gamma)` returns what is added to
      the anchor; gamma defaults to 1. D and anchor: trees of the same float32 arrays.

    Raises:
      ValueError: momentum outside [0, 1), a negative or infinite rate.

    Communication: none; element-wise, so it runs on shards.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020, algorithm 1.
    """
    beta = _number("`momentum`", momentum, below=1)
    alpha = _number("`slow_learning_rate`", slow_learning_rate)

    def init_fn(params: PyTree) -> SlowMomentumState:
        return SlowMomentumState(
            velocity=jax.tree.map(jnp.zeros_like, params),
            last_rate=jnp.ones([], jnp.float32),
            made_at=jnp.zeros([], jnp.float32),
            since=jnp.zeros([], jnp.float32),
        )

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        learning_rate: jax.Array | float = 1.0,
        **extra: Any,
    ) -> tuple[PyTree, SlowMomentumState]:
        del params, extra
        gamma = _rate(learning_rate)
        # The paper's u (here m) with beta = momentum, alpha = slow_learning_rate, x_t,0 = anchor:
        #   u_t = beta u_{t-1} + (x_t,0 - x_t,tau) / gamma_t
        # Times gamma_t, with v_t = gamma_t u_t and D = x_t,0 - x_t,tau:
        #   v_t = beta (gamma_t / gamma_{t-1}) v_{t-1} + D
        # where the factor in front is at most gamma_t / r, or beta where that is more.
        carried = jnp.minimum(
            _times(beta, _ratio(gamma, state.last_rate)),
            jnp.maximum(beta, _ratio(gamma, state.made_at)),
        )
        velocity = jax.tree.map(lambda v, d: _times(carried, v) + d, state.velocity, updates)
        #   x_{t+1},0 = x_t,0 - alpha gamma_t u_t = x_t,0 - alpha v_t
        # Nesterov takes beta u_t + D / gamma_t for u_t, so beta v_t + D for v_t.
        if nesterov:
            ahead = jax.tree.map(lambda v, d: _times(beta, v) + d, velocity, updates)
        else:
            ahead = velocity
        step = jax.tree.map(lambda a: _times(-alpha, a), ahead)
        made_at = jnp.maximum(_times(beta, state.made_at), jnp.maximum(state.since, gamma))
        after = SlowMomentumState(velocity, gamma, made_at, jnp.zeros_like(state.since))
        return step, match_varying(after, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _number(argument: str, value: Any, below: float = math.inf) -> float | jax.Array:
    """Return a rate or a momentum as a float; of a traced one only the type can be checked."""
    is_number = not isinstance(value, bool) and isinstance(
        value, int | float | np.number | np.ndarray | jax.Array
    )
    is_scalar = is_number and not np.shape(value)
    if not is_scalar or not jnp.isrealobj(value) or jnp.result_type(value) == jnp.bool_:
        shape = f" of shape {list(np.shape(value))}" if is_number else ""
        raise ValueError(f"{argument} must be a number, got {value!r}{shape}.")
    if isinstance(value, Tracer):
        return jnp.asarray(value, jnp.float32)
    # A plain float is weakly typed: NumPy scalars would widen the state under x64.
    number = float(value)
    if not 0 <= number < below:
        rule = f"lie in [0, {below})"
        if below == math.inf:
            rule = "be finite" if number == math.inf else "be >= 0"
        raise ValueError(f"{argument} must {rule}, got {number}.")
    return number


def _times(factor: float | jax.Array, x: jax.Array) -> jax.Array:
    """Return `factor * x` in x's dtype."""
    return (factor if isinstance(factor, int | float) else factor.astype(x.dtype)) * x


def _rate(learning_rate: jax.Array | float) -> jax.Array:
    """() float32 >= 0: a schedule that ends at 0 may miss it by a rounding error, below it too."""
    return jnp.maximum(jnp.asarray(learning_rate, jnp.float32), 0.0)


def _ratio(now: jax.Array, before: jax.Array) -> jax.Array:
    """`now / before`, 1 where `before` is 0."""
    return jnp.where(before > 0, now / jnp.where(before > 0, before, 1.0), 1.0)


def _outer_rate(learning_rate: LearningRate) -> OuterRate:
    """How slow momentum comes to know gamma."""
    if callable(learning_rate):
        schedule = learning_rate
        # Rates that may grow again are watched in every update; see `slow_momentum`.
        return OuterRate(lambda count, told: jnp.asarray(schedule(count)), _observed)
    if learning_rate == "optimizer":
        return OuterRate(_told_rate, _observed, _agreed, is_told=True)
    if isinstance(learning_rate, str):
        raise ValueError(
            'slowmo: `learning_rate` must be a number, a schedule, "optimizer" or None, got '
            f"{learning_rate!r}."
        )
    # None takes D as it is: m has the unit of parameters.
    rate = 1.0 if learning_rate is None else _number("slowmo: `learning_rate`", learning_rate)
    return OuterRate(lambda count, told: jnp.asarray(rate))


def _told_rate(count: jax.Array, told: Mapping[str, Any]) -> jax.Array:
    del count
    if told.get("learning_rate") is None:
        raise ValueError(
            'slowmo: `learning_rate`="optimizer" must be told the rate in every update. '
            "js.make_train_step does that for `sync`, not for a slowmo inside of `optimizer`; in a "
            "loop of your own call `update(updates, state, params, learning_rate=rate)`."
        )
    rate = _rate(told["learning_rate"])
    if rate.shape:
        raise ValueError(
            "slowmo: the `learning_rate` that an update is told must be a scalar, got shape "
            f"{rate.shape}."
        )
    return rate


def _observed(state: SlowMomentumState, gamma: jax.Array) -> SlowMomentumState:
    """The state after an update at this rate, slow or not: what it moved, velocity will hold."""
    return state._replace(since=jnp.maximum(state.since, _rate(gamma)))


def _agreed(
    state: SlowMomentumState, gamma: jax.Array, axes: tuple[str, ...]
) -> tuple[SlowMomentumState, jax.Array]:
    """The largest rates of the replicas that have one; where none has, that of before.

    Communication: one all-reduce of 8 bytes over `axes`.
    """
    # Each replica steps its own shard of the anchor: with rates of their own they would step apart.
    own = jnp.stack([gamma, state.since])
    # jax has no derivative of pmax, and calls a rule of one's own (jax.custom_jvp) without the axis
    # inside of vmap and jit. So each replica differentiates its own rate, of which this adds 0.
    zero = own - lax.stop_gradient(own)
    # Of infinity it would be NaN, on the replica alone whose rate is infinite.
    zero = jnp.where(jnp.isfinite(own), zero, 0)
    largest, since = lax.pmax(lax.stop_gradient(own), axes) + zero
    gamma = jnp.where(largest == NO_RATE, state.last_rate, largest)
    return state._replace(since=since), gamma


def _check_base(base: ParameterTransform | None, schedule: Every, exact_average: bool) -> None:
    warn = warn_once()
    if base is None:
        if not exact_average:
            raise ValueError(
                "slowmo: `exact_average=False` takes what `base` left, and without a base the "
                "replicas would never communicate: give a base, such as js.local_sgd(...)."
            )
        warn(
            "slowmo without a `base`: replicas do not communicate between slow steps. Pass "
            "base=js.local_sgd(...), or use js.diloco where that is meant."
        )
        return
    if not isinstance(base, ParameterTransform):
        raise ValueError(
            "slowmo: `base` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(base).__name__}; an optimizer stands before slowmo in js.chain."
        )
    if base.anchor is not None:
        raise ValueError(
            "slowmo: `base` must have no slow step of its own, since both would be called slow; "
            "got a transform with an anchor (js.slowmo or js.diloco)."
        )
    # Only plain periods are compared: of others nobody can say what was meant.
    own = base.schedules[0]
    if own.is_plain and schedule.is_plain and schedule.k % own.k:
        warn(
            f"slowmo: `sync_every`={schedule.k} is not a multiple of the base's {own.k}, so some "
            "averages fall between slow steps unevenly."
        )
