"""Exchanges that do not take place while a replica holds NaN or infinity."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import AxisName, Phase, PyTree
from ..mesh import vary_over, varying_axes
from ..tree import landing
from ._base import (
    Communicate,
    ParameterTransform,
    check_axis_argument,
    check_update_arguments,
    decide,
    increment,
    run_if,
)
from ._carry import Carried, Placement, carry_leaf


class OnlyFiniteState(NamedTuple):
    """State of `only_finite`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    refused: jax.Array  # () int32, exchanges that did not take place; equal on all replicas
    inner: PyTree  # state of the transform inside


def only_finite(inner: ParameterTransform, axis_name: AxisName) -> ParameterTransform:
    """Skips an exchange where a replica's parameters are not finite, and counts what it skipped.

    One replica that diverges would make all others NaN by the next average. Here it stays alone,
    and `state.refused > 0` tells it: stop then, or go back to a checkpoint. Training on is
    possible, but nothing is exchanged until the replica recovers; and gossip scheduled on the host
    (`mode="host"`) would take other rounds than its state, which does not rotate when it skips.

    With y = params + updates, before an update in which `inner` is due all replicas learn whether y
    is finite everywhere.

    Args:
      inner: the transform that exchanges: `js.local_sgd`, `js.sgp`, `js.slowmo`, `js.diloco`, ...
      axis_name: the axis, or all axes, over which it does.

    Returns:
      A `js.ParameterTransform`, to be used in its place; also as a `base`.

    Raises:
      ValueError: `inner` that is no `js.ParameterTransform`.

    Communication: `inner`'s, and before each of its exchanges one all-reduce of 4 bytes over
      `axis_name`, which waits for the gradients: `js.sgp(overlap=1)` no longer overlaps.
    """
    owner = "only_finite"
    check_axis_argument(owner, "axis_name", axis_name)
    if not isinstance(inner, ParameterTransform):
        raise ValueError(
            f"{owner}: `inner` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(inner).__name__}."
        )

    def init_fn(params: PyTree) -> OnlyFiniteState:
        zero = jnp.zeros([], jnp.int32)
        return OnlyFiniteState(zero, zero, inner.init(params))

    def update_fn(
        updates: PyTree,
        state: OnlyFiniteState,
        params: PyTree | None = None,
        *,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        **extra: Any,
    ) -> tuple[PyTree, OnlyFiniteState]:
        check_update_arguments(owner, params, phase, None)
        count = increment(state.count)

        def poisoned_replicas(y: PyTree) -> jax.Array:
            with jax.named_scope("phase:*"):  # part of whichever exchange is due
                return lax.psum((~_is_finite(y)).astype(jnp.int32), axis_name)

        def nobody_asks(y: PyTree) -> jax.Array:
            del y
            return jnp.zeros([], jnp.int32)

        due = decide(inner.due(count) if phase is None else bool(phase), communicate)
        poisoned = run_if(due, poisoned_replicas, nobody_asks, landing(params, updates))
        updates, inner_state = inner.update(
            updates,
            state.inner,
            params,
            communicate=decide(due, poisoned == 0),
            weight=weight,
            phase=phase,
            **extra,
        )
        refused = state.refused + vary_over(
            (poisoned > 0).astype(jnp.int32), varying_axes(state.refused)
        )
        return updates, OnlyFiniteState(count, refused, inner_state)

    def sized(axis_sizes: Mapping[str, int]) -> ParameterTransform:
        return only_finite(inner.sized(axis_sizes), axis_name)

    def carry(state: OnlyFiniteState, params: PyTree, old: Placement, new: Placement) -> Carried:
        found = inner.carry(state.inner, params, old, new)
        return found._replace(
            state=OnlyFiniteState(
                carry_leaf(state.count, old, new), carry_leaf(state.refused, old, new), found.state
            )
        )

    anchor = inner.anchor
    return ParameterTransform(
        init_fn,
        update_fn,
        phase=inner.phase,
        due=inner.due,
        schedules=inner.schedules,
        numerator=lambda state, y: inner.numerator(state.inner, y),
        reset=lambda state: state._replace(inner=inner.reset(state.inner)),
        anchor=None if anchor is None else lambda state, params: anchor(state.inner, params),
        sized=sized,
        carry=carry,
        shares=lambda state: inner.shares(state.inner),
    )


def _is_finite(tree: PyTree) -> jax.Array:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))
