"""What the fragments of a model do in an update after the base: take, send, make a slow step."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._support.types import Phase, PyTree
from ...mesh import match_varying, specs_of_leaves
from ...transform import (
    Communicate,
    Every,
    Exchange,
    either,
    phase_scope,
    replica_mean,
    run_if,
    run_one_of,
)
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


def events_at(turn: "Outer", t: int) -> Phase:
    """Return the events of a fragment in update `t`."""
    for events in _options(turn):
        if _is_due(turn, events, t):
            return tuple(map(turn.fragment.event, events))
    return ()


def _options(turn: "Outer") -> tuple[tuple[str, ...], ...]:
    """Return what may be due together; the last part travels in the update of the slow step."""
    return ((TAKE,), (SEND,), (SEND, SLOW)) if turn.delay else ((SLOW,),)


def _is_due(turn: "Outer", events: tuple[str, ...], t: Any) -> Any:
    """Return whether exactly these events are due in update `t`, an int or an array."""
    if events == (TAKE,):
        return turn.schedule(t + turn.delay)
    if events == (SEND,):
        return within(turn.schedule, t + 1, turn.delay - 1)
    return turn.schedule(t)


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
        """Return the operand after the events of all fragments; `now` are further attributes.

        At most one fragment has events in an update. The program holds one switch over all that
        may be due, or with a phase what it names.
        """
        updates, others, state = operand
        members = [cls(turn, params, *now) for turn in turns]
        own = zip(members, views(turns, state), strict=True)
        state = joined(state, [one.outer.observed(part, one.rate) for one, part in own])
        index: int | jax.Array = 0
        branches: list[Callable[[Operand], Operand]] = [lambda operand: operand]
        missed: list[Any] = []
        for number, one in enumerate(members):
            missed.append(False)
            for events in _options(one.outer):
                due = one.is_due(events, state.count)
                missed[-1] = either(missed[-1], due)
                which = len(branches)
                branches.append(functools.partial(one.with_events, events, turns, number))
                is_static = isinstance(due, bool)
                index = (which if due else index) if is_static else jnp.where(due, which, index)
        communicate = members[0].communicate
        operand = run_if(
            communicate,
            functools.partial(run_one_of, index, branches),
            lambda operand: operand,
            (updates, others, state),
        )
        if communicate is True or not turns[0].delay:
            return operand
        updates, others, state = operand
        parts = views(turns, state)
        for number, due in enumerate(missed):
            skipped = jnp.logical_and(due, jnp.logical_not(communicate))
            flight = parts[number].in_flight
            # Of a displacement that has not travelled whole there is no mean.
            flight = flight._replace(parts=jnp.where(skipped, NOTHING, flight.parts))
            parts[number] = parts[number]._replace(in_flight=flight)
        return updates, others, joined(state, parts)

    def is_due(self, events: tuple[str, ...], count: jax.Array) -> bool | jax.Array:
        """Return whether exactly these events of the fragment are due."""
        if self.phase is None:
            return _is_due(self.outer, events, count)
        own = events_of([self.outer])
        named = tuple(map(self.outer.fragment.event, events))
        return tuple(event for event in self.phase if event in own) == named

    def with_events(
        self, events: tuple[str, ...], turns: Sequence["Outer"], number: int, operand: Operand
    ) -> Operand:
        """Return the operand, with the state of all fragments, after events of this one."""
        updates, others, state = operand
        parts = views(turns, state)
        one: Operand = updates, others, parts[number]
        for event in events:
            does = {TAKE: self.take, SEND: self.send}
            does[SLOW] = self.land if self.outer.delay else self.slow
            one = does[event](one)
        updates, others, parts[number] = one
        return updates, others, joined(state._replace(base=parts[number].base), parts)

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
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return updates, others, state._replace(in_flight=match_varying(fresh, old))

    def send(self, operand: Operand) -> Operand:
        """Average the next part of what is in flight."""
        updates, others, state = operand
        with phase_scope(self.outer.fragment.event(SEND)):
            flight = average_part(state.in_flight, self.outer.exchange, self.outer.delay)
        return updates, others, state._replace(in_flight=match_varying(flight, state.in_flight))

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
