"""What one fragment does in an update after the base: take, send, or make its slow step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._support.types import Phase, PyTree
from ...mesh import axis_names, match_varying
from ...transform import (
    Communicate,
    Every,
    Exchange,
    decide,
    phase_scope,
    replica_mean,
    run_if,
)
from ...tree import apply_exactly, landing, subtracted
from ._delay import NOTHING, InFlight, arrived, average_part, checked_delay, within
from ._fragments import Fragments, checked_fragments
from ._merge import checked_merge

if TYPE_CHECKING:
    from ._outer import Operand, Outer, OuterState

TAKE, SEND, SLOW = "take", "send", "slow"  # the events of a fragment


@dataclass(frozen=True)
class Turn:
    """One update of a fragment; call it with updates, other averaged arrays, and its state.

    Attributes:
      outer: the outer optimizer of the fragment.
      params: the parameters, whole.
      weight: this replica's weight; None weighs all equally.
      rate: the inner learning rate; None if the outer optimizer does not use it.
      communicate: the argument of `update`.
      phase: the argument of `update`.
    """

    outer: "Outer"
    params: PyTree
    weight: jax.Array | None
    rate: jax.Array | None
    communicate: Communicate
    phase: Phase | None

    def __call__(self, operand: "Operand") -> "Operand":
        """Return the operand after the event of this update, if there is one."""
        outer, count = self.outer, operand[2].count
        if not outer.delay:
            slow = self.is_due(SLOW, outer.schedule(count), self.communicate)
            return run_if(slow, self.slow, lambda o: o, operand)
        sending = within(outer.schedule, count, outer.delay)
        taken = self.is_due(TAKE, outer.schedule(count + outer.delay), True)
        operand = run_if(taken, self.take, lambda o: o, operand)
        # The last part travels in the update of the slow step.
        sent = self.is_due(SEND, sending, True, SLOW)
        operand = run_if(decide(sent, self.communicate), self.send, lambda o: o, operand)
        if self.communicate is not True:
            operand = self.drop_if(sent, operand)
        slow = self.is_due(SLOW, outer.schedule(count), self.communicate)
        return run_if(slow, self.land, lambda o: o, operand)

    def is_due(self, event: str, due: Any, communicate: Communicate, *more: str) -> Any:
        """Return whether an event, or one of `more`, is due and communicates."""
        if self.phase is None:
            return decide(due, communicate)
        names = (self.outer.fragment.event(name) for name in (event, *more))
        return decide(any(name in self.phase for name in names), communicate)

    def permitted(self, operand: "Operand") -> tuple[Any, "OuterState"]:
        """Return whether the base permits the exchange, and the state afterwards."""
        updates, others, state = operand
        base = self.outer.base.spec.exchange
        if base.permit is None or not self.outer.exact_average:
            return True, state
        # A base such as only_finite may refuse the step before anything is averaged.
        axes = tuple(dict.fromkeys((*axis_names(self.outer.exchange.axis_name), *base.axes)))
        y = apply_exactly(self.params, updates)
        return self.outer.permit(state, y, others, axes)

    def slow(self, operand: "Operand") -> "Operand":
        """Make the slow step after the base's update, unless the base refuses it."""
        with phase_scope(self.outer.fragment.event(SLOW)):
            allowed, state = self.permitted(operand)
            operand = (*operand[:2], state)
            if allowed is True:
                return self.outer_step(operand)
            return run_if(allowed, self.outer_step, lambda o: o, operand)

    def outer_step(self, operand: "Operand") -> "Operand":
        """Make the slow step.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        updates, others, state = operand
        # D, the pseudo-gradient: the displacement since the last slow step, with sign reversed.
        displacement, residual, others, base_state = self.outer.displacement(
            landing(self.params, updates), self.weight, others, state
        )
        operand = updates, others, state._replace(base=base_state)
        return self.outer.stepped(self.params, displacement, residual, self.rate, operand)

    def take(self, operand: "Operand") -> "Operand":
        """Take what this fragment sends, unless the base refuses it."""
        outer = self.outer
        allowed, state = self.permitted(operand)
        allowed = decide(allowed, self.communicate)
        x, mass = outer.numerator(landing(self.params, operand[0]), self.weight, state)
        flight: InFlight = state.in_flight
        fresh = InFlight(
            values=jax.tree.map(lambda new, old: new.astype(old.dtype), x, flight.values),
            mass=jnp.ones_like(flight.mass) if mass is None else mass.astype(flight.mass.dtype),
            rate=jnp.ones_like(flight.rate) if self.rate is None else self.rate.astype(jnp.float32),
            parts=jnp.where(allowed, jnp.zeros_like(flight.parts), NOTHING),
        )
        return (*operand[:2], state._replace(in_flight=match_varying(fresh, flight)))

    def send(self, operand: "Operand") -> "Operand":
        """Average the next part of what is in flight."""
        updates, others, state = operand
        with phase_scope(self.outer.fragment.event(SEND)):
            flight = average_part(state.in_flight, self.outer.exchange, self.outer.delay)
        flight = match_varying(flight, state.in_flight)
        return updates, others, state._replace(in_flight=flight)

    def drop_if(self, sent: Any, operand: "Operand") -> "Operand":
        """Drop what is in flight where a part should have travelled, and nothing communicates."""
        updates, others, state = operand
        flight = state.in_flight
        missed = jnp.logical_and(sent, jnp.logical_not(self.communicate))
        parts = jnp.where(missed, NOTHING, flight.parts)
        return updates, others, state._replace(in_flight=flight._replace(parts=parts))

    def land(self, operand: "Operand") -> "Operand":
        """Make the slow step with what has arrived, if all of it has."""
        outer, (updates, others, state) = self.outer, operand
        flight = state.in_flight
        with phase_scope(outer.fragment.event(SLOW)):
            average, anyone = arrived(flight, outer.exchange)
            moved = jax.tree.map(subtracted, state.anchor, outer.anchor.store(average))
            displacement = jax.tree.map(lambda d: jnp.where(anyone, d, 0), moved)
            if others:
                _, mass = outer.numerator(landing(self.params, updates), self.weight, state)
                others = replica_mean(others, Exchange(outer.exchange.axis_name), mass)
            rate = None if outer.rate is None else flight.rate
            after = outer.stepped(self.params, displacement, None, rate, (updates, others, state))
        is_whole = flight.parts == outer.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        before = updates, operand[1], state
        updates, others, state = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old), after, before
        )
        flight = flight._replace(parts=jnp.full_like(flight.parts, NOTHING))
        return updates, others, state._replace(in_flight=flight)


def turns(
    owner: str,
    fragments: Fragments,
    delay: int,
    merge: float,
    schedule: Every,
    exchange: Exchange,
    *,
    exact_average: bool = True,
) -> dict[str, Any]:
    """Return the checked arguments of `Outer` that say how its slow steps are spread.

    Raises:
      ValueError: an argument that is out of its range, or that does not fit the schedule, the codec
        or slow steps without an exact average.
    """
    options: dict[str, Any] = {
        "fragments": checked_fragments(owner, fragments, schedule),
        "delay": checked_delay(owner, delay, fragments, schedule),
        "merge": checked_merge(owner, merge),
    }
    changed = {"fragments": fragments != 1, "delay": delay, "merge": merge}
    for name in changed if not exact_average else ():
        if changed[name]:
            raise ValueError(
                f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is "
                f"nothing to spread or to keep; got {name}={options[name]!r}."
            )
    if delay and exchange.codec is not None:
        raise ValueError(
            f"{owner}: with a `delay` what is in flight is partly a mean, which a `codec` can't "
            f"encode again; got delay={delay} and {exchange.codec!r}."
        )
    if merge and exchange.codec is not None and exchange.codec.error_feedback:
        raise ValueError(
            f"{owner}: `merge` keeps the progress of a replica, and so does error feedback: its "
            f"rounding error would be kept twice; got merge={merge!r} and {exchange.codec!r}."
        )
    return options
