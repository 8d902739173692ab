"""The slow steps of one fragment, in one update or with a delay."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._support.types import Phase, PyTree
from ...mesh import match_varying
from ...transform import Exchange, phase_scope, replica_mean, run_if
from ...tree import landing, subtracted, updates_to
from ._delay import NOTHING, InFlight, arrived, average_part, updates_left, within
from ._fragments import SEND, TAKE, Fragment
from ._merge import merged
from ._outer import Outer
from ._state import SLOW, Now, Operand, OuterState


@dataclass(frozen=True, kw_only=True)
class FragmentSteps(Outer):
    """An outer optimizer that steps the leaves of one fragment.

    The parameters, updates and others of an operand are whole; anchor, outer state and values in
    flight are those of the fragment.

    Attributes:
      fragment: the leaves.
      delay: number of updates between taking what is sent and applying its mean.
      merge: the share of a replica's own progress that a slow step keeps.
    """

    fragment: Fragment
    delay: int
    merge: float

    @property
    def stepper(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer; parts of the buffers of stages are stepped as they are."""
        return super().stepper if self.fragment.places is None else self.optimizer

    def options(self, phase: Phase | None) -> tuple[tuple[str, ...], ...]:
        """Return the events that may be due in one update, or with a phase those that are."""
        if phase is not None:
            # Any of them: a host that exchanges beside its steps leaves out what sends.
            events = tuple(x for x in (TAKE, SEND, SLOW) if self.fragment.event(x) in phase)
            return (events,) if events else ()
        # The last part travels in the update of the slow step.
        return ((TAKE,), (SEND,), (SEND, SLOW)) if self.delay else ((SLOW,),)

    def is_now(self, events: tuple[str, ...], t: Any) -> Any:
        """Return whether exactly these events are due in update `t`, an int or an array."""
        if events == (TAKE,):
            return self.schedule(t + self.delay)
        if events == (SEND,):
            return within(self.schedule, t + 1, self.delay - 1)
        return self.schedule(t)

    def named(self, events: tuple[str, ...]) -> Phase:
        """Return these events of the fragment as they stand in phases."""
        return tuple(map(self.fragment.event, events))

    def own_phase(self, t: int) -> Phase:
        """Return the events of update `t`."""
        return next((self.named(x) for x in self.options(None) if self.is_now(x, t)), ())

    def own_due(self, t: Any) -> Any:
        """Return whether the fragment has an event in update `t`."""
        # Taking what is sent comes one update before the first part of it.
        return within(self.schedule, t, self.delay + 1) if self.delay else self.schedule(t)

    def parts_before(self, t: int) -> int:
        """Return how many parts of what is in flight were sent in the updates before `t`."""
        is_sent = within(self.schedule, t, self.delay)
        return self.delay - 1 - updates_left(self.schedule, t) if is_sent else 0

    def after(self, events: tuple[str, ...], params: PyTree, now: Now, operand: Operand) -> Operand:
        """Return the operand after these events."""
        steps = {TAKE: self.take, SEND: self.send, SLOW: self.land if self.delay else self.slow}
        for event in events:
            with phase_scope(self.fragment.event(event)):
                operand = steps[event](params, now, operand)
        return operand

    def slow(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Make the slow step with an exchange in this update, unless the base refuses it."""

        def step(operand: Operand) -> Operand:
            anchor = operand[2].anchor
            x, mass = self.numerator(landing(params, operand[0]), now.weight, operand[2].base)
            displacement, residual = self.displacement(
                self.fragment.of(x), mass, anchor, may_be_idle=now.weight is not None
            )
            return self.moved(params, displacement, residual, now.rate, mass, operand)

        allowed, operand = self.permitted(params, operand)
        return run_if(allowed, step, lambda operand: operand, operand)

    def moved(
        self,
        params: PyTree,
        displacement: PyTree,
        residual: PyTree | None,
        rate: jax.Array | None,
        mass: jax.Array | None,
        operand: Operand,
    ) -> Operand:
        """Return updates and state after the outer optimizer's step with this displacement."""
        updates, others, state = operand
        if others:
            others = replica_mean(others, Exchange(self.exchange.axis_name), mass)
        leaves = self.fragment.of(params)
        anchor, state = self.stepped(leaves, displacement, rate, state)

        def with_anchor(tree: PyTree) -> PyTree:
            local = self.fragment.of(tree)
            new = merged(local, anchor, self.merge)
            new = jax.tree.map(lambda n, x: n.astype(x.dtype), new, local)
            return self.fragment.put(tree, new)

        target = merged(landing(leaves, self.fragment.of(updates)), anchor, self.merge)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), leaves, target)
        updates = self.fragment.put(updates, updates_to(leaves, target))
        # What the base still has under way moves alike.
        base = self.base.spec.exchange.settle(state.base, with_anchor)
        return updates, others, state._replace(base=base)

    def take(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Take what this fragment sends, unless the base refuses it."""
        allowed, operand = self.permitted(params, operand)
        updates, others, state = operand
        x, mass = self.numerator(landing(params, updates), now.weight, state.base)
        # Weighted values and their weight, whose sums over replicas give the exact mean. The rate
        # goes with them: the displacement was made at it, however late it is applied.
        old: InFlight = state.in_flight
        one = jnp.ones_like(old.mass)
        taken = InFlight(
            values=jax.tree.map(
                lambda new, like: new.astype(like.dtype), self.fragment.of(x), old.values
            ),
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if now.rate is None else now.rate.astype(one.dtype),
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return updates, others, state._replace(in_flight=match_varying(taken, old))

    def send(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Average the next part of what is in flight."""
        del params, now
        updates, others, state = operand
        return updates, others, self.sent(state)

    def sent(self, state: OuterState) -> OuterState:
        """Return the state with the next part of what is in flight averaged."""
        flight = average_part(state.in_flight, self.exchange, self.delay)
        return state._replace(in_flight=match_varying(flight, state.in_flight))

    def land(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Make the slow step with what has arrived, if all of it has."""
        state = operand[2]
        flight: InFlight = state.in_flight
        average, has_weight = arrived(flight, self.exchange)
        displacement = jax.tree.map(
            lambda old, new: jnp.where(has_weight, subtracted(old, new), 0),
            state.anchor,
            self.anchor.store(average),
        )
        rate = None if self.rate is None else flight.rate
        _, mass = self.numerator(landing(params, operand[0]), now.weight, state.base)
        after = self.moved(params, displacement, None, rate, mass, operand)
        is_whole = flight.parts == self.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        updates, others, state = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old), after, operand
        )
        return updates, others, state._replace(in_flight=dropped(flight, True))


def dropped(flight: InFlight, when: Any) -> InFlight:
    """Return what is in flight, or nothing: of a part of a displacement there is no mean."""
    parts = jnp.where(when, NOTHING, flight.parts).astype(jnp.int32)
    return flight._replace(parts=parts)
