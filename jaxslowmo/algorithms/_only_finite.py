"""Exchanges that do not take place while a replica holds NaN or infinity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.scopes import EVERY_PHASE
from .._support.types import Phase, PyTree
from ..transform import (
    Carried,
    Communicate,
    Exchange,
    Others,
    ParameterTransform,
    StatePlacement,
    carry_leaf,
    carry_plainly,
    decide,
    increment,
    inside,
    parameter_transform,
    phase_scope,
    run_if,
)
from ..tree import all_finite, apply_exactly
from ._gossip import any_round

_OWNER = "only_finite"


class OnlyFiniteState(NamedTuple):
    """State of `only_finite`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    refused: jax.Array  # () int32, exchanges that did not take place; equal on all replicas
    inner: PyTree  # state of the transform inside


def only_finite(inner: ParameterTransform, *others: object, **named: object) -> ParameterTransform:
    """Skips an exchange where a replica's parameters are not finite, and counts what it skipped.

    One replica that diverges would make all others NaN by the next average. Here it stays alone,
    and `state.refused > 0` tells it: stop then, or go back to a checkpoint. Training on is
    possible, but nothing is exchanged until the replica recovers. Model state that
    `js.make_train_step` averages with the parameters (`model_state="sync_mean"`) must be finite
    too, and is not averaged either (`"broadcast"` is no part of the exchange and not looked at).

    With y = params + updates, before an update in which `inner` is due all replicas learn whether y
    is finite everywhere. What an idle replica's batch (weight 0) made of its updates does not
    count. As the `base` of an exact `js.slowmo` it looks before the slow step, too, and refuses it.

    Args:
      inner: the transform that exchanges: `js.local_sgd`, `js.sgp`, `js.slowmo`, `js.diloco`, ...
      *others: nothing; an axis is refused with a message, since `inner` has its own.
      **named: nothing, likewise.

    Returns:
      A `js.ParameterTransform`, to be used in its place; also as a `base`. Its phases name no round
      of gossip: which one is next depends on what was refused, so programs decide it.

    Raises:
      ValueError: more than one argument, `inner` that is no `js.ParameterTransform`, or one of your
        own that does not tell its `axes`.

    Communication: `inner`'s, and before each of its exchanges one all-reduce of 4 bytes over all of
      its axes (those of the largest group, in `js.hierarchical_local_sgd`), which waits for the
      gradients: `js.sgp(overlap=1)` no longer overlaps.
    """
    if others or named:
        besides = [*map(repr, others), *(f"{name}={value!r}" for name, value in named.items())]
        raise ValueError(
            f"{_OWNER}: takes one argument, `inner`, whose axes it uses, such as "
            f'js.only_finite(js.local_sgd("replica")); got {besides[0]} besides.'
        )
    if not isinstance(inner, ParameterTransform):
        raise ValueError(
            f"{_OWNER}: `inner` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(inner).__name__}."
        )
    if not inner.axes:
        raise ValueError(
            f"{_OWNER}: `inner` must tell its `axes`, the names of all axes over which it "
            "exchanges, got a ParameterTransform without."
        )

    return _OnlyFinite(inner).transform()


@dataclass(frozen=True)
class _OnlyFinite:
    """The transform around `inner`."""

    inner: ParameterTransform

    def transform(self) -> ParameterTransform:
        inner = self.inner

        def asked(ask: Callable[..., Any]) -> Callable[..., Any]:
            """Ask the transform inside about its own part of the state."""
            return lambda state, *args: ask(state.inner, *args)

        def changed(change: Callable[..., PyTree]) -> Callable[..., OnlyFiniteState]:
            """The state with another one inside: it has counters alone besides."""
            return lambda state, *args: state._replace(inner=change(state.inner, *args))

        return parameter_transform(
            _OWNER,
            self.init,
            self.step,
            # What it does not say otherwise is as inside.
            inner.spec,
            over=[Exchange(inner.axes)],
            inner=inner,
            packs=False,
            state=OnlyFiniteState,
            phase=lambda t, skipped=0: any_round(inner.phase(t, skipped)),
            skipped=None,
            events=None,
            numerator=asked(inner.numerator),
            reset=changed(inner.reset),
            permit=self.permit,
            anchor=None if inner.anchor is None else asked(inner.anchor),
            sized=lambda axis_sizes: only_finite(inner.sized(axis_sizes)),
            with_specs=lambda specs, **options: only_finite(inner.with_specs(specs, **options)),
            shards=asked(inner.shards),
            # Leaf by leaf, where that is right for what is inside.
            carry=carry_plainly if inner.carry is carry_plainly else self.carry,
            like_on=changed(inner.like_on),
            shares=asked(inner.shares),
        )

    def init(self, params: PyTree) -> OnlyFiniteState:
        # Counted on all replicas alike, since all hear the same answer.
        zero = jnp.zeros([], jnp.int32)
        return OnlyFiniteState(zero, zero, self.inner.init(params))

    def permit(
        self, state: OnlyFiniteState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[jax.Array, OnlyFiniteState]:
        """See `ExchangeSpec.permit`: are y and what travels along finite on all replicas?"""
        # A sum of flags rather than of values: what is not finite must not travel.
        poisoned = lax.psum((~all_finite((y, others))).astype(jnp.int32), tuple(axes))
        refused = state.refused + (poisoned > 0).astype(jnp.int32)
        return poisoned == 0, state._replace(refused=refused)

    def step(
        self,
        updates: PyTree,
        others: Others,
        state: OnlyFiniteState,
        params: PyTree,
        *,
        communicate: Communicate,
        phase: Phase | None,
        **extra: Any,
    ) -> tuple[PyTree, Others, OnlyFiniteState]:
        """One update; see `ExchangeSpec.exchange`."""
        state = state._replace(count=increment(state.count))

        def ask(operand: tuple[PyTree, Others]) -> tuple[jax.Array, OnlyFiniteState]:
            u, o = operand
            with phase_scope(EVERY_PHASE):  # part of whichever exchange is due
                return self.permit(state, apply_exactly(params, u), o, self.inner.axes)

        # Asked only where an exchange is due: other updates stay free of collectives.
        due = self.inner.due(state.count) if phase is None else bool(phase)
        due = decide(due, communicate)
        # The answer is the same on all replicas, so it may decide about an exchange.
        allowed, state = run_if(
            due, ask, lambda operand: (jnp.ones([], bool), state), (updates, others)
        )
        extra |= {"communicate": decide(due, allowed), "phase": phase}
        with inside(self.inner.axes):
            updates, others, inner_state = self.inner.exchange(
                updates, others, state.inner, params, **extra
            )
        return updates, others, state._replace(inner=inner_state)

    def carry(
        self, state: OnlyFiniteState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        found = self.inner.carry(state.inner, params, old, new)
        count, refused = carry_leaf(state.count, old, new), carry_leaf(state.refused, old, new)
        return found._replace(state=OnlyFiniteState(count, refused, found.state))
