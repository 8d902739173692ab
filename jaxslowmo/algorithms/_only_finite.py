"""A wrapper that skips exchanges while a replica's parameters hold NaN or infinity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.scopes import EVERY_PHASE
from .._support.settings import records_settings
from .._support.types import PyTree
from ..transform import (
    Event,
    Now,
    Operand,
    Others,
    ParameterTransform,
    Sync,
    Wrapper,
    phase_scope,
    run_if,
)
from ..tree import all_finite, apply_exactly


class OnlyFiniteState(NamedTuple):
    """The state of `only_finite`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    refused: jax.Array  # () int32, exchanges that were skipped; equal on all replicas
    inner: PyTree  # state of the wrapped transform


@records_settings
def only_finite(inner: ParameterTransform, *others: object, **named: object) -> ParameterTransform:
    """Skip an exchange if any replica's parameters are NaN or infinite, and count the skipped ones.

    One replica that diverges would make all others NaN with the next average. This wrapper skips
    the exchange instead, so that the others stay finite, and `state.refused` counts the skipped
    exchanges. If it is above 0, stop or go back to a checkpoint. Training can go on, but nothing is
    exchanged until the replica recovers. Model state that `js.make_train_step` averages with the
    parameters (`model_state="sync_mean"`) must be finite too, and is skipped with them
    (`"broadcast"` is not part of the exchange and is not checked).

    With y = params + updates, all replicas check together whether y is finite everywhere, before
    each event of `inner` that is due: an average, a slow step, and with a `delay` also what takes
    and sends for it. Each refusal counts. An idle replica's updates (weight 0) are not looked at.
    As the `base` of an exact `js.slowmo` it also checks before the slow step, and may skip it.

    Args:
      inner: the transform that exchanges: `js.local_sgd`, `js.sgp`, `js.slowmo`, `js.diloco`, ...
      *others: must be empty; an axis here is a common mistake, since `inner` has its own.
      **named: must be empty, for the same reason.

    Returns:
      A `js.ParameterTransform` that replaces `inner`, also as a `base`. Its phases name no round of
      gossip: the next round depends on the skipped exchanges, so programs read it from the state.

    Raises:
      ValueError: more than one argument, or `inner` that is no `js.ParameterTransform`.

    Communication: that of `inner`, and before each of its exchanges one all-reduce of 4 bytes over
      all of its axes (of the largest group in `js.hierarchical_local_sgd`). This all-reduce waits
      for the gradients, so `js.sgp(overlap=1)` no longer overlaps.
    """
    if others or named:
        besides = [*map(repr, others), *(f"{name}={value!r}" for name, value in named.items())]
        raise ValueError(
            f"only_finite: takes one argument, `inner`, whose axes it uses, such as "
            f'js.only_finite(js.local_sgd("replica")); got {besides[0]} besides.'
        )
    if not isinstance(inner, ParameterTransform):
        raise ValueError(
            f"only_finite: `inner` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(inner).__name__}."
        )
    return ParameterTransform(OnlyFinite(inner.sync))


@dataclass(frozen=True)
class OnlyFinite(Wrapper):
    """The algorithm `base`, each of whose exchanges all replicas allow first."""

    base: Sync
    owner = "only_finite"
    state = OnlyFiniteState

    def init(self, params: PyTree) -> OnlyFiniteState:
        """Return the first state."""
        # All replicas count the same, since all receive the same answer.
        zero = jnp.zeros([], jnp.int32)
        return OnlyFiniteState(zero, zero, self.base.init(params))

    def like_init(self, params: PyTree) -> OnlyFiniteState:
        """See `Sync.like_init`."""
        return self.init(params)._replace(inner=self.base.like_init(params))

    def events(self) -> list[Event]:
        """Return the events of `base`, each after a check."""
        # How many exchanges took place is known in the state alone, so phases name no form.
        return [
            replace(event, run=partial(self.checked, event), forms=None, is_unconditional=False)
            for event in super().events()
        ]

    def checked(self, event: Event, operand: Operand, now: Now) -> Operand:
        """Run an event, unless a replica has values that are not finite."""
        updates, others, state = operand
        # Each event is checked. Forms name themselves: the check is part of whichever is due.
        with phase_scope(event.name if event.forms is None else EVERY_PHASE):
            y = apply_exactly(now.params, updates)
            allowed, state = self.permit(state, y, others, self.axes)

        def run(operand: Operand) -> Operand:
            return event.applied(operand, now)

        def refused(operand: Operand) -> Operand:
            if event.replaces:  # what is before it has not run
                operand = self.local(operand, now)
            return operand if event.missed is None else event.missed(operand, True, now)

        # The answer is the same on all replicas, so it may decide about an exchange.
        return run_if(allowed, run, refused, (updates, others, state), axes=self.bound_axes)

    def permit(
        self, state: OnlyFiniteState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[jax.Array, OnlyFiniteState]:
        """Return whether y and `others` are finite on all replicas; see `Sync.permit`.

        Communication: one all-reduce of 4 bytes over `axes`.
        """
        # Flags are summed and not values, so that no NaN is sent.
        poisoned = lax.psum((~all_finite((y, others))).astype(jnp.int32), tuple(axes))
        refused = state.refused + (poisoned > 0).astype(jnp.int32)
        return poisoned == 0, state._replace(refused=refused)
