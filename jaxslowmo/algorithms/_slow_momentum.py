"""The outer optimizer of SlowMo."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._typing import PyTree
from ..mesh import match_varying


class SlowMomentumState(NamedTuple):
    """State of `slow_momentum`."""

    velocity: PyTree  # like the anchor, float32: v = gamma * m
    learning_rate: jax.Array  # () float32, gamma of the last slow step; 1 before the first
    made_at: jax.Array  # () float32, gamma at which `velocity` was made (r); 0 before the first
    since: jax.Array  # () float32, largest gamma since the last slow step; 0 where not observed


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
      ValueError: momentum outside [0, 1) or a negative rate.

    Communication: none; element-wise, so it runs on shards.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020, algorithm 1.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must lie in [0, 1), got {momentum}.")
    if not slow_learning_rate >= 0:
        raise ValueError(f"`slow_learning_rate` must be >= 0, got {slow_learning_rate}.")

    # Plain floats are weakly typed: NumPy scalars would widen the state under x64.
    momentum, slow_learning_rate = float(momentum), float(slow_learning_rate)

    def init_fn(params: PyTree) -> SlowMomentumState:
        return SlowMomentumState(
            velocity=jax.tree.map(jnp.zeros_like, params),
            learning_rate=jnp.ones([], jnp.float32),
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
        now = _rate(learning_rate)
        carried = jnp.minimum(
            momentum * _ratio(now, state.learning_rate),
            jnp.maximum(momentum, _ratio(now, state.made_at)),
        )
        velocity = jax.tree.map(
            lambda v, d: carried.astype(d.dtype) * v + d, state.velocity, updates
        )
        if nesterov:
            ahead = jax.tree.map(lambda v, d: momentum * v + d, velocity, updates)
        else:
            ahead = velocity
        step = jax.tree.map(lambda a: -slow_learning_rate * a, ahead)
        made_at = jnp.maximum(momentum * state.made_at, jnp.maximum(state.since, now))
        after = SlowMomentumState(velocity, now, made_at, jnp.zeros_like(state.since))
        return step, match_varying(after, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def observe_rate(state: SlowMomentumState, learning_rate: jax.Array) -> SlowMomentumState:
    """The state after an update at this rate, slow or not: what it moved, velocity will hold."""
    return state._replace(since=jnp.maximum(state.since, _rate(learning_rate)))


def _rate(learning_rate: jax.Array | float) -> jax.Array:
    """() float32 >= 0: a schedule that ends at 0 may miss it by a rounding error, below it too."""
    return jnp.maximum(jnp.asarray(learning_rate, jnp.float32), 0.0)


def _ratio(now: jax.Array, before: jax.Array) -> jax.Array:
    """`now / before`, 1 where `before` is 0."""
    return jnp.where(before > 0, now / jnp.where(before > 0, before, 1.0), 1.0)
