"""SlowMo: slow momentum on top of any base algorithm."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import (
    checks_flags,
    records_settings,
    warn_once,
)
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec
from ..transform import (
    Every,
    InnerPeriods,
    ParameterTransform,
    TypedTransform,
    as_schedule,
    checked_group,
    checked_rate,
    every,
)
from ..tree import times
from .outer import ALONE, Fragments, OuterRate, outer_algorithm, resolve_shard_state

LearningRate = float | optax.Schedule | Literal["optimizer"] | None


class SlowMomentumState(NamedTuple):
    """The state of `slow_momentum`.

    No field shares its name with a hyperparameter of optax, since
    `optax.tree.set(state, learning_rate=...)` sets every field of that name in a chain.
    """

    velocity: PyTree  # like the anchor, float32: v = gamma * m
    last_rate: jax.Array  # () float32, gamma of the last slow step; 1 before the first
    made_at: jax.Array  # () float32, r, the gamma that made `velocity`; 0 before the first
    since: jax.Array  # () float32, largest gamma since the last slow step; 0 if not observed


@records_settings
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
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
    fragments: Fragments = 1,
    delay: int = 0,
    merge: float = 0.0,
    inner_state: InnerPeriods = "keep",
) -> ParameterTransform:
    """Average the replicas every `sync_every` updates, and move them with slow momentum (SlowMo).

    Put it last in a chain. Between slow steps `base` runs. A slow step computes, with gamma =
    `learning_rate` now and D = anchor - average of the replicas' y = params + updates:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_learning_rate * gamma * m

    Then all replicas set their parameters to the anchor, which starts as the initial parameters.
    More on each argument: [docs/api/algorithms.md](#details).

    Args:
      axis_name: mapped axis of the replicas.
      base: a `ParameterTransform` such as `js.local_sgd(...)`; None: independent training.
      sync_every: period of the slow step in updates, or `js.every(...)`.
      momentum: slow momentum in [0, 1), a number or a traced scalar.
      slow_learning_rate: step size of the slow step, >= 0.
      learning_rate: inner learning rate gamma: a float >= 0, a schedule, None for 1, `"optimizer"`.
      shard_state: whether each replica keeps only 1/R of anchor and momentum; None decides.
      exact_average: True averages y in the slow step; False takes y after the exchange of `base`.
      nesterov: whether the slow step has Nesterov form.
      local_axis_name: axis of the L devices inside a replica; each then exchanges 1/L.
      bucket_bytes: approximate size of a buffer in bytes; None: one buffer per dtype.
      codec: format of the slow exchange, such as `js.codecs.int8()`; None is float32.
      fragments: number P of parts that take slow steps in turn, or a function from name to part.
      delay: number of updates, below `sync_every` / P, beside which a slow step's values are sent.
      merge: share in [0, 1] of its own progress that a replica keeps; 0 takes the anchor.
      inner_state: "keep", "reset" or "average" the optimizer's moments then, or periods of theirs.

    Returns:
      A `ParameterTransform` with `state.shared["anchor"]` and `["outer"]`, a `SlowMomentumState`,
      in float32 (float64 for float64 leaves); in `state.local` where `exact_average=False`.

    Raises:
      ValueError: arguments that are wrong or exclude each other; later an unbound axis, no params.
      UserWarning: once, without a base, on one replica, or if sync_every does not fit the base's.

    Communication: in a slow step one reduce-scatter and one all-gather of N bytes (sharded), or one
      all-reduce; with a codec an all-to-all and an all-gather of its bytes. Else what `base` sends.

    Source: Wang et al., "SlowMo", ICLR 2020, algorithm 1; FairScale 0.4.13.
    """
    owner = "slowmo"
    group = checked_group(owner, axis_name, local_axis_name, bucket_bytes, codec)
    schedule = as_schedule(sync_every)
    _check_base(base, schedule, exact_average)
    if shard_state and not exact_average:
        raise ValueError(
            "slowmo: `exact_average=False` keeps each replica's own anchor, which `shard_state`="
            "True cannot shard: leave it out."
        )
    inner = ALONE if base is None else base.algorithm
    shard_state = resolve_shard_state(owner, shard_state, group, exact_average=exact_average)
    # Wang et al., algorithm 1: tau steps of the base algorithm, the exact average (line 6), and the
    # slow momentum update (lines 7 and 8), which is the outer optimizer here.
    algorithm = outer_algorithm(
        owner,
        group,
        schedule,
        slow_momentum(momentum, slow_learning_rate, nesterov=nesterov),
        base=inner,
        exact_average=exact_average,
        is_sharded=shard_state,
        rate=_outer_rate(learning_rate),
        fragments=fragments,
        delay=delay,
        merge=merge,
        inner_state=inner_state,
    )
    return ParameterTransform(algorithm)


@checks_flags("slow_momentum")
def slow_momentum(
    momentum: float = 0.5, slow_learning_rate: float = 1.0, *, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer of slow steps: momentum on how far the replicas moved since the last one.

    With D = anchor - average and gamma the inner learning rate now:

        m <- momentum * m + D / gamma
        anchor <- anchor - slow_learning_rate * gamma * m                              (plain)
        anchor <- anchor - slow_learning_rate * gamma * (momentum * m + D / gamma)     (nesterov)

    The state stores v = gamma * m. A slow step rescales it by gamma_now / gamma_before (1 if
    gamma_before is 0), so a learning rate of 0 causes neither inf nor NaN.

    The factor of v is momentum * gamma_now / gamma_before. If the rate has grown again, the factor
    is at most gamma_now / r, r being the rate that made v: the largest gamma since the slow step
    before, or momentum times the previous r if that is larger. So no displacement returns larger
    than the present rate would have made it. Rates that only fall or only grow are not affected.
    Without this limit a rate that falls to a small floor and restarts would diverge: D, made at
    high rates, is divided by the floor, and would return larger by peak / floor.

    Args:
      momentum: factor of the previous m, in [0, 1).
      slow_learning_rate: step size of the outer step, >= 0.
      nesterov: look ahead by one momentum step.

    Returns:
      An optax transform: `update(D, state, anchor, learning_rate=gamma)` returns the update of the
      anchor; gamma defaults to 1. D and anchor are trees of equally shaped float32 arrays.

    Raises:
      ValueError: momentum outside [0, 1), a negative or infinite rate.

    Communication: none; element-wise, so it runs on shards.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020, algorithm 1.
    """
    beta = checked_rate("momentum", momentum, below=1)
    alpha = checked_rate("slow_learning_rate", slow_learning_rate)

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
        # The factor of v_{t-1} is at most the larger of gamma_t / r and beta.
        carried = jnp.minimum(
            times(beta, _ratio(gamma, state.last_rate)),
            jnp.maximum(beta, _ratio(gamma, state.made_at)),
        )
        velocity = jax.tree.map(lambda v, d: times(carried, v) + d, state.velocity, updates)
        #   x_{t+1},0 = x_t,0 - alpha gamma_t u_t = x_t,0 - alpha v_t
        # Nesterov uses beta u_t + D / gamma_t instead of u_t, so beta v_t + D instead of v_t.
        if nesterov:
            ahead = jax.tree.map(lambda v, d: times(beta, v) + d, velocity, updates)
        else:
            ahead = velocity
        step = jax.tree.map(lambda a: times(-alpha, a), ahead)
        made_at = jnp.maximum(times(beta, state.made_at), jnp.maximum(state.since, gamma))
        return step, SlowMomentumState(velocity, gamma, made_at, jnp.zeros_like(state.since))

    return TypedTransform(init_fn, update_fn)


def _rate(learning_rate: jax.Array | float) -> jax.Array:
    """Return the rate as () float32 >= 0; rounding may take a schedule that ends at 0 below it."""
    return jnp.maximum(jnp.asarray(learning_rate, jnp.float32), 0.0)


def _ratio(now: jax.Array, before: jax.Array) -> jax.Array:
    """Return `now / before`, or 1 where `before` is 0."""
    return jnp.where(before > 0, now / jnp.where(before > 0, before, 1.0), 1.0)


def _outer_rate(learning_rate: LearningRate) -> OuterRate:
    """Return the source of gamma for an argument `learning_rate`."""
    if callable(learning_rate):
        schedule = learning_rate
        # Rates that may grow again are observed in every update; see `slow_momentum`.
        return OuterRate(lambda count, _: jnp.asarray(schedule(count)), _observe_rate)
    if learning_rate == "optimizer":
        return OuterRate(_passed_rate, _observe_rate, True, lambda state: state.last_rate)
    if isinstance(learning_rate, str):
        raise ValueError(
            'slowmo: `learning_rate` must be a number, a schedule, "optimizer" or None, got '
            f"{learning_rate!r}."
        )
    # None leaves D undivided, so that m has the unit of parameters.
    rate = 1.0 if learning_rate is None else checked_rate("learning_rate", learning_rate)
    return OuterRate(lambda count, _: jnp.asarray(rate))


def _passed_rate(count: jax.Array, learning_rate: Any) -> jax.Array:
    del count
    if learning_rate is None:
        raise ValueError(
            'slowmo: `learning_rate`="optimizer" needs the rate in every `update(..., '
            "learning_rate=rate)`, which js.make_train_step passes to its `sync` alone."
        )
    rate = _rate(learning_rate)
    if rate.shape:
        raise ValueError(
            f"slowmo: the `learning_rate` of an update must be a scalar, got shape {rate.shape}."
        )
    return rate


def _observe_rate(state: SlowMomentumState, gamma: jax.Array) -> SlowMomentumState:
    """Return the state after any update at this rate, since the next `velocity` includes it."""
    return state._replace(since=jnp.maximum(state.since, _rate(gamma)))


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
            "base=js.local_sgd(...), or use js.diloco if you mean that."
        )
        return
    if not isinstance(base, ParameterTransform):
        raise ValueError(
            "slowmo: `base` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(base).__name__}; an optimizer stands before slowmo in js.chain."
        )
    if base.algorithm.has_anchor or base.algorithm.inner_state != "keep":
        raise ValueError(
            "slowmo: `base` must have no slow step of its own, as js.diloco and js.noloco have, "
            f"and no `inner_state`, which is for slow steps; got {base!r}."
        )
    # Only plain periods are compared; other schedules may be uneven on purpose.
    inner = next(
        (x.due for x in base.algorithm.events if isinstance(x.due, Every)), every(1)
    )  # a single node of gossip has none
    if inner.is_plain and schedule.is_plain and schedule.k % inner.k:
        warn(
            f"slowmo: `sync_every`={schedule.k} is not a multiple of the base's {inner.k}, so some "
            "averages fall between slow steps unevenly."
        )
