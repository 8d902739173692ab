"""What the fragments of a model do in an update after the base: take, send, make a slow step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._support.types import Phase, PyTree
from ...mesh import match_varying, specs_of_leaves
from ...transform import Communicate, Every, Exchange, decide, phase_scope, replica_mean, run_if
from ...tree import landing, subtracted, updates_to
from ._delay import (
    NOTHING,
    InFlight,
    arrived,
    average_part,
    check_turn,
    checked_delay,
    within,
)
from ._fragments import (
    SEND,
    SLOW,
    TAKE,
    Fragment,
    Fragments,
    check_period,
    checked_fragments,
    divided,
    joined,
    views,
)
from ._merge import checked_merge
from ._state import Operand, OuterState

if TYPE_CHECKING:
    from ._outer import Outer


def turns_of(outer: "Outer", params: PyTree | None) -> list["Outer"]:
    """Return the outer optimizer of each fragment; without `params` for its schedule alone.

    Raises:
      ValueError: the number of fragments does not fit parameters, period and delay; without
        `params`, it is that of a function, and no state was made yet.
    """
    if params is not None:
        fragments = divided(outer.owner, outer.fragments, params)
        count = outer.known["fragments"] = len(fragments)
        check_period(outer.owner, count, outer.schedule)
        check_turn(outer.owner, outer.delay, count, outer.schedule)
    else:
        count = outer.known.get("fragments") if callable(outer.fragments) else outer.fragments
        if count is None:
            raise ValueError(
                f"{outer.owner}: `fragments` is a function, so their number is known once a state "
                "was made: call `init` before phases are asked for."
            )
        fragments = [Fragment(number, ()) for number in range(count)]
    if count == 1:
        return [replace(outer, fragments=1)]
    turns = []
    for fragment in fragments:
        exchange, schedule = outer.exchange, outer.schedule
        if exchange.param_specs is not None and params is not None:
            specs = specs_of_leaves(exchange.param_specs, params)
            own_specs = [specs[place] for place in fragment.places or ()]
            exchange = replace(exchange, param_specs=own_specs)
        offset = schedule.offset + (fragment.number + 1) * schedule.k // count
        schedule = replace(schedule, offset=offset)
        turns.append(
            replace(outer, fragment=fragment, exchange=exchange, schedule=schedule, fragments=1)
        )
    return turns


def events_of(turns: Sequence["Outer"]) -> tuple[str, ...]:
    """Return all events of these fragments."""
    return tuple(turn.fragment.event(name) for turn in turns for name in (TAKE, SEND, SLOW))


def event_at(turn: "Outer", t: int) -> str | None:
    """Return the event of a fragment in update `t`; None if there is none."""
    if turn.schedule(t):
        return turn.fragment.event(SLOW)
    if turn.delay and turn.schedule(t + turn.delay):
        return turn.fragment.event(TAKE)
    return turn.fragment.event(SEND) if is_sent(turn, t) else None


def is_sent(turn: "Outer", t: Any) -> Any:
    """Return whether a fragment sends anything in update `t`."""
    return within(turn.schedule, t, turn.delay) if turn.delay else turn.schedule(t)


def whole_anchor(turns: Sequence["Outer"], state: OuterState, params: PyTree) -> PyTree:
    """Return the anchor of all fragments as a tree like `params`; see `LayoutSpec.anchor`."""
    whole = params
    for turn, own in zip(turns, views(turns, state), strict=True):
        part = turn.anchor.restore(own.anchor, turn.fragment.of(params))
        whole = turn.fragment.put(whole, part)
    return whole


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

    @classmethod
    def of_all(
        cls, turns: Sequence["Outer"], params: PyTree, now: tuple[Any, ...], operand: Operand
    ) -> Operand:
        """Return the operand after the events of all fragments; `now` are further attributes."""
        updates, others, state = operand
        after, base = [], state.base
        for turn, own in zip(turns, views(turns, state), strict=True):
            one = cls(turn, params, *now)
            own = turn.observed(own._replace(base=base), one.rate)
            updates, others, own = one((updates, others, own))
            after.append(own)
            base = own.base
        return updates, others, joined(state._replace(base=base), after)

    def __call__(self, operand: Operand) -> Operand:
        """Return the operand after the event of this update, if there is one."""
        outer, count = self.outer, operand[2].count
        if not outer.delay:
            slow = self.is_due(outer.schedule(count), self.communicate, SLOW)
            return run_if(slow, self.slow, lambda o: o, operand)
        taken = self.is_due(outer.schedule(count + outer.delay), True, TAKE)
        operand = run_if(taken, self.take, lambda o: o, operand)
        # The last part travels in the update of the slow step.
        sent = self.is_due(is_sent(outer, count), True, SEND, SLOW)
        operand = run_if(decide(sent, self.communicate), self.send, lambda o: o, operand)
        if self.communicate is not True:
            operand = self.drop_if(sent, operand)
        slow = self.is_due(outer.schedule(count), self.communicate, SLOW)
        return run_if(slow, self.land, lambda o: o, operand)

    def is_due(self, due: Any, communicate: Communicate, *events: str) -> Any:
        """Return whether one of the events is due and communicates."""
        if self.phase is None:
            return decide(due, communicate)
        names = (self.outer.fragment.event(name) for name in events)
        return decide(any(name in self.phase for name in names), communicate)

    def slow(self, operand: Operand) -> Operand:
        """Make the slow step in one update, unless the base refuses it."""
        with phase_scope(self.outer.fragment.event(SLOW)):
            allowed, operand = self.outer.permitted(self.params, operand)
            return run_if(allowed, self.outer_step, lambda o: o, operand)

    def outer_step(self, operand: Operand) -> Operand:
        """Make the slow step of this fragment with an exchange in this update."""
        outer, anchor = self.outer, operand[2].anchor
        x, mass = self.numerator(operand)
        displacement, residual = outer.displacement(
            outer.fragment.of(x), mass, anchor, self.weight is not None
        )
        return self.stepped(displacement, residual, self.rate, mass, operand)

    def numerator(self, operand: Operand) -> tuple[PyTree, jax.Array | None]:
        """Return the weighted parameters, whole, and their weight; see `Outer.numerator`."""
        y = landing(self.params, operand[0])
        return self.outer.numerator(y, self.weight, operand[2].base)

    def stepped(
        self,
        displacement: PyTree,
        residual: PyTree | None,
        rate: jax.Array | None,
        mass: jax.Array | None,
        operand: Operand,
    ) -> Operand:
        """Return updates and state after the outer optimizer's step of this fragment."""
        outer, (updates, others, state) = self.outer, operand
        fragment = outer.fragment
        if others:
            others = replica_mean(others, Exchange(outer.exchange.axis_name), mass)
        own = fragment.of(self.params)
        y = landing(own, fragment.of(updates))
        target, anchor, state = outer.stepped(own, y, displacement, residual, rate, state)

        def moved(tree: PyTree) -> PyTree:
            return fragment.put(tree, outer.moved(anchor)(fragment.of(tree)))

        base = outer.base.spec.exchange.settle(state.base, moved)
        updates = fragment.put(updates, updates_to(own, target))
        return updates, others, state._replace(base=base)

    def take(self, operand: Operand) -> Operand:
        """Take what this fragment sends, unless the base refuses it."""
        allowed, operand = self.outer.permitted(self.params, operand)
        updates, others, state = operand
        x, mass = self.numerator(operand)
        old: InFlight = state.in_flight
        taken = jax.tree.map(
            lambda new, like: new.astype(like.dtype), self.outer.fragment.of(x), old.values
        )
        one = jnp.ones_like(old.mass)
        fresh = InFlight(
            values=taken,
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if self.rate is None else self.rate.astype(one.dtype),
            parts=jnp.where(decide(allowed, self.communicate), 0, NOTHING).astype(jnp.int32),
        )
        return updates, others, state._replace(in_flight=match_varying(fresh, old))

    def send(self, operand: Operand) -> Operand:
        """Average the next part of what is in flight."""
        updates, others, state = operand
        with phase_scope(self.outer.fragment.event(SEND)):
            flight = average_part(state.in_flight, self.outer.exchange, self.outer.delay)
        return updates, others, state._replace(in_flight=match_varying(flight, state.in_flight))

    def drop_if(self, sent: Any, operand: Operand) -> Operand:
        """Drop what is in flight where a part should have travelled, and nothing communicates."""
        updates, others, state = operand
        missed = jnp.logical_and(sent, jnp.logical_not(self.communicate))
        parts = jnp.where(missed, NOTHING, state.in_flight.parts)
        return updates, others, state._replace(in_flight=state.in_flight._replace(parts=parts))

    def land(self, operand: Operand) -> Operand:
        """Make the slow step with what has arrived, if all of it has."""
        outer, (_, _, state) = self.outer, operand
        flight: InFlight = state.in_flight
        with phase_scope(outer.fragment.event(SLOW)):
            average, anyone = arrived(flight, outer.exchange)
            moved = jax.tree.map(subtracted, state.anchor, outer.anchor.store(average))
            displacement = jax.tree.map(lambda d: jnp.where(anyone, d, 0), moved)
            rate = None if outer.rate is None else flight.rate
            _, mass = self.numerator(operand)
            after = self.stepped(displacement, None, rate, mass, operand)
        is_whole = flight.parts == outer.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        updates, others, state = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old), after, operand
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
