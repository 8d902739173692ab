"""A wrapper that skips exchanges while a replica's parameters hold NaN or infinity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.scopes import EVERY_PHASE
from .._support.settings import records_settings
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
    """The state of `only_finite`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    refused: jax.Array  # () int32, exchanges that were skipped; equal on all replicas
    inner: PyTree  # state of the wrapped transform


@records_settings
def only_finite(inner: ParameterTransform, *others: object, **named: object) -> ParameterTransform:
    """Skip exchanges while a replica's parameters are not finite, and count them.

    One replica that diverges would make all others NaN with the next average. This wrapper skips
    the exchange instead, so that the others stay finite, and `state.refused` counts the skipped
    exchanges. If it is above 0, stop or go back to a checkpoint. Training can go on, but nothing is
    exchanged until the replica recovers. Model state that `js.make_train_step` averages with the
    parameters (`model_state="sync_mean"`) must be finite too, and is skipped with them
    (`"broadcast"` is not part of the exchange and is not checked).

    With y = params + updates, all replicas check together whether y is finite everywhere, in every
    update in which `inner` is due. Updates from an idle replica's batch (weight 0) do not count. As
    the `base` of an exact `js.slowmo` it also checks before the slow step, and may skip it.

    Args:
      inner: the transform that exchanges: `js.local_sgd`, `js.sgp`, `js.slowmo`, `js.diloco`, ...
      *others: must be empty; an axis here is a common mistake, since `inner` has its own.
      **named: must be empty, for the same reason.

    Returns:
      A `js.ParameterTransform` that replaces `inner`, also as a `base`. Its phases name no round of
      gossip: the next round depends on the skipped exchanges, so programs read it from the state.

    Raises:
      ValueError: more than one argument, `inner` that is no `js.ParameterTransform`, or a transform
        of your own that does not name its `axes`.

    Communication: that of `inner`, and before each of its exchanges one all-reduce of 4 bytes over
      all of its axes (of the largest group in `js.hierarchical_local_sgd`). This all-reduce waits
      for the gradients, so `js.sgp(overlap=1)` no longer overlaps.
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
            f"{_OWNER}: `inner` must have `axes`, the names of all axes over which it "
            "exchanges, got a ParameterTransform without."
        )

    return _OnlyFinite(inner).transform()


@dataclass(frozen=True)
class _OnlyFinite:
    """The transform that wraps `inner`."""

    inner: ParameterTransform

    def transform(self) -> ParameterTransform:
        inner = self.inner

        def of_inner(read: Callable[..., Any]) -> Callable[..., Any]:
            """Return `read` as a function of the whole state instead of the inner state."""
            return lambda state, *args: read(state.inner, *args)

        def changed(change: Callable[..., PyTree]) -> Callable[..., OnlyFiniteState]:
            """Return `change`, a function of the inner state, as a function of the whole state."""
            return lambda state, *args: state._replace(inner=change(state.inner, *args))

        return parameter_transform(
            _OWNER,
            self.init,
            self.step,
            # Everything that is not overridden below is as in `inner`.
            inner.spec,
            over=[Exchange(inner.axes)],
            inner=inner,
            packs=False,
            state=OnlyFiniteState,
            phase=lambda t, skipped=0: any_round(inner.phase(t, skipped)),
            skipped=None,
            events=None,
            numerator=of_inner(inner.numerator),
            reset=changed(inner.reset),
            settle=changed(inner.settle),
            permit=self.permit,
            anchor=None if inner.anchor is None else of_inner(inner.anchor),
            sized=lambda axis_sizes: only_finite(inner.sized(axis_sizes)),
            with_specs=lambda specs, **options: only_finite(inner.with_specs(specs, **options)),
            shards=of_inner(inner.shards),
            # The counters are carried leaf by leaf; so is the whole state if `inner`'s is.
            carry=carry_plainly if inner.carry is carry_plainly else self.carry,
            like_on=changed(inner.like_on),
            shares=of_inner(inner.shares),
        )

    def init(self, params: PyTree) -> OnlyFiniteState:
        # All replicas count the same, since all receive the same answer.
        zero = jnp.zeros([], jnp.int32)
        return OnlyFiniteState(zero, zero, self.inner.init(params))

    def permit(
        self, state: OnlyFiniteState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[jax.Array, OnlyFiniteState]:
        """Return whether y and `others` are finite on all replicas; see `ExchangeSpec.permit`."""
        # Flags are summed and not values, so that no NaN is sent.
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
        """Make one update; see `ExchangeSpec.exchange`."""
        state = state._replace(count=increment(state.count))

        def check(operand: tuple[PyTree, Others]) -> tuple[jax.Array, OnlyFiniteState]:
            u, o = operand
            with phase_scope(EVERY_PHASE):  # part of any exchange that is due
                return self.permit(state, apply_exactly(params, u), o, self.inner.axes)

        # Checked only if an exchange is due, so that other updates stay free of collectives.
        due = self.inner.due(state.count) if phase is None else bool(phase)
        due = decide(due, communicate)
        # The answer is the same on all replicas, so it may decide about an exchange.
        allowed, state = run_if(
            due, check, lambda operand: (jnp.ones([], bool), state), (updates, others)
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
        carried = self.inner.carry(state.inner, params, old, new)
        count, refused = carry_leaf(state.count, old, new), carry_leaf(state.refused, old, new)
        return carried._replace(state=OnlyFiniteState(count, refused, carried.state))
