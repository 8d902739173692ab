"""An outer optimizer whose slow steps are spread: over fragments, over updates, or both."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.types import Phase, PyTree
from ...transform import (
    BesideSpec,
    either,
    layouts_known,
    run_if,
    run_one_of,
)
from ...tree import Staged, parts_of
from ._anchor import Anchor
from ._delay import average_all, check_delay, check_turn, nothing_in_flight
from ._fragment_steps import FragmentSteps, dropped
from ._fragments import (
    SEND,
    TAKE,
    Fragment,
    Fragments,
    check_fragments,
    check_period,
    divided,
    exchange_of,
    joined,
    keys_in,
    views,
)
from ._merge import check_merge
from ._outer import Outer
from ._state import ALONE, SLOW, Now, Operand, OuterState


@dataclass(frozen=True, kw_only=True)
class Fragmented(Outer):
    """The parameter transform of an outer optimizer that steps the fragments of a model in turn.

    The base exchanges all leaves, as if there were no slow step, and comes first.

    Attributes:
      fragments: the number of fragments, or the function that says to which a leaf belongs.
      delay: number of updates between taking what is sent and applying its mean.
      merge: the share of a replica's own progress that a slow step keeps, in [0, 1].
      counted: the number of fragments that a function makes, once a state was made.
      schedules_of: the fragments without leaves, by their number, as a host asks for each phase.
    """

    fragments: Fragments = 1
    delay: int = 0
    merge: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    schedules_of: dict[int, list[FragmentSteps]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Check that the arguments fit each other.

        Raises:
          ValueError: an argument that is out of its range, or that does not fit the schedule, the
            codec or slow steps without an exact average.
        """
        owner, codec = self.owner, self.exchange.codec
        check_fragments(owner, self.fragments, self.schedule)
        check_delay(owner, self.delay, self.fragments, self.schedule)
        check_merge(owner, self.merge)
        if not self.exact_average:
            raise ValueError(
                f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is "
                f"nothing to spread or to keep; got fragments={self.fragments!r}, "
                f"delay={self.delay!r}, merge={self.merge!r}."
            )
        if self.delay and codec is not None:
            raise ValueError(
                f"{owner}: with a `delay` what is in flight is partly a mean, which a `codec` "
                f"can't encode again; got delay={self.delay} and {codec!r}."
            )
        if self.merge and codec is not None and codec.error_feedback:
            raise ValueError(
                f"{owner}: `merge` keeps the progress of a replica, and so does error feedback: "
                f"its rounding error would be kept twice; got merge={self.merge!r}, {codec!r}."
            )

    @property
    def replaces_base(self) -> bool:
        """Return False: the base exchanges in every update in which it is due."""
        return False

    @property
    def events(self) -> tuple[str, ...] | None:
        """Return the names of its events in phases; None where they are not known yet."""
        if callable(self.fragments) and "fragments" not in self.counted:
            return None
        return tuple(
            one.fragment.event(name) for one in self.turns() for name in (TAKE, SEND, SLOW)
        )

    @property
    def beside(self) -> BesideSpec | None:
        """Return the exchange of a fragment as one program; None with devices that share it."""
        # With devices that share a replica's work, its local steps hold collectives already, which
        # the exchange would have to wait for.
        if not self.delay or self.exchange.local_axis_name is not None:
            return None
        return BesideSpec(
            without=lambda phase: tuple(event for event in phase if event not in self.sends),
            sent=lambda state, phase: self.flights(state)[self.sender(phase)],
            exchange=functools.partial(average_all, exchange=self.exchange, delay=self.delay),
            put=self.with_flight,
            ends=lambda phase: self.turns()[self.sender(phase)].fragment.event(SLOW) in phase,
            is_behind=self.is_behind,
        )

    @property
    def _sends_always(self) -> bool:
        """Return whether any update may send: each but one does, which overwrites what it sent."""
        return 0 < self.delay == self.schedule.k - 1 and len(self.turns()) == 1

    @property
    def sends(self) -> list[str]:
        """Return the event of each fragment in which it sends."""
        return [one.fragment.event(SEND) for one in self.turns()]

    def sender(self, phase: Phase) -> int:
        """Return the number of the fragment that sends in a phase."""
        return next(number for number, event in enumerate(self.sends) if event in phase)

    def flights(self, state: OuterState) -> list[Any]:
        """Return what each fragment has in flight."""
        return [part.in_flight for part in views(keys_in(len(self.turns()), state), state)]

    def is_behind(self, state: OuterState, t: int) -> bool:
        """Return whether a fragment has sent less of what is in flight than update `t` expects."""
        # -1 stands for nothing in flight: the base refused the displacement, and none is expected.
        return any(
            0 <= int(flight.parts) < one.parts_before(t)
            for one, flight in zip(self.turns(), self.flights(state), strict=True)
        )

    def with_flight(self, state: OuterState, phase: Phase, flight: Any) -> OuterState:
        """Return the state with `flight` of the fragment that sends in `phase`."""
        keys, number = keys_in(len(self.turns()), state), self.sender(phase)
        parts = views(keys, state)
        parts[number] = parts[number]._replace(in_flight=flight)
        return joined(state, keys, parts)

    @property
    def has_flight(self) -> bool:
        """Return whether states hold what is in flight."""
        return self.delay > 0

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters."""
        return divided(self.owner, self.fragments, params)

    def turns(self, params: PyTree | None = None) -> list[FragmentSteps]:
        """Return the outer optimizer of each fragment; without `params` for its schedule alone.

        Raises:
          ValueError: the number of fragments does not fit parameters, period and delay; without
            `params`, it is that of a function, and no state was made yet.
        """
        if params is not None:
            parts = self.divided(params)
            self.counted["fragments"] = len(parts)
            check_period(self.owner, len(parts), self.schedule)
            check_turn(self.owner, self.delay, len(parts), self.schedule)
        else:
            count = self.counted.get("fragments") if callable(self.fragments) else self.fragments
            if count is None:
                raise ValueError(
                    f"{self.owner}: `fragments` is a function, so their number is known once a "
                    "state was made: call `init` before phases are asked for."
                )
            # Every step on the host asks for phases several times, for which leaves don't matter.
            if count not in self.schedules_of:
                parts = [Fragment(i, None if count == 1 else ()) for i in range(count)]
                self.schedules_of[count] = [self._turn(part, count, None) for part in parts]
            return self.schedules_of[count]
        return [self._turn(part, len(parts), params) for part in parts]

    def _turn(self, fragment: Fragment, count: int, params: PyTree | None) -> FragmentSteps:
        exchange, schedule = self.exchange, self.schedule
        if params is not None:
            exchange = exchange_of(fragment, exchange, params)
        offset = schedule.offset + (fragment.number + 1) * schedule.k // count
        common = {f.name: getattr(self, f.name) for f in fields(Outer)}
        of_fragment = {"exchange": exchange, "schedule": replace(schedule, offset=offset)}
        return FragmentSteps(
            **{**common, **of_fragment}, fragment=fragment, delay=self.delay, merge=self.merge
        )

    def own_phase(self, t: int) -> Phase:
        """Return the events of update `t` besides the base's."""
        return tuple(event for one in self.turns() for event in one.own_phase(t))

    def own_due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything besides what the base does."""
        return functools.reduce(either, (one.own_due(t) for one in self.turns()))

    def first_state(self, params: PyTree, store: Callable[[Anchor, PyTree], Any]) -> OuterState:
        """Return the first state, with anchors that `store` makes."""
        turns, states = self.turns(params), []
        if turns[0].fragment.places is not None and parts_of(params, Staged):
            self._check_element_wise(params)
        for one in turns:
            leaves = one.fragment.of(params)
            # The base has all leaves, and one state.
            state = replace(one, base=ALONE).first_state(leaves, store)
            flight = nothing_in_flight(leaves) if self.delay else ()
            states.append(state._replace(in_flight=flight))
        with layouts_known():
            state = states[0]._replace(base=self.base.init(params))
        return joined(state, keys_of(turns), states)

    def _check_element_wise(self, params: PyTree) -> None:
        """Raise `ValueError` unless the outer optimizer can step parts of flat buffers."""
        if why := self.placement.why_whole(params):
            raise ValueError(
                f"{self.owner}: `fragments` of a model in stages are parts of its flat buffers, so "
                f"`outer_optimizer` must be element-wise, and {why}. Use fragments=1 with this one."
            )

    def whole_anchor(self, state: OuterState, params: PyTree) -> PyTree:
        """Return the anchor of all fragments as a tree like `params`; see `LayoutSpec.anchor`."""
        whole, turns = params, self.on(params).turns(params)
        for one, part in zip(turns, views(keys_of(turns), state), strict=True):
            anchor = one.anchor.restore(part.anchor, one.fragment.of(params))
            whole = one.fragment.put(whole, anchor)
        return whole

    def step(self, updates: PyTree, others: Any, state: Any, params: PyTree, **now: Any) -> Any:
        """Make one update; see `ExchangeSpec.exchange`."""
        # A function's fragments are counted before phases are read, also in a run that goes on.
        self.turns(params)
        return super().step(updates, others, state, params, **now)

    def around(
        self,
        based: Callable[..., Operand],
        params: PyTree,
        now: Now,
        base_phase: Phase | None,
        operand: Operand,
    ) -> Operand:
        """Make the base's exchange, and then what is due of the fragments.

        At most one fragment has events in an update. The program holds one switch over all that
        may be due, or with a phase what it names.
        """
        del base_phase
        updates, others, state = based(operand, now.communicate)
        turns = self.turns(params)
        parts = views(keys_of(turns), state)
        observed = [one.observed(part, now.rate) for one, part in zip(turns, parts, strict=True)]
        # With a conditional around it the exchange would run beside nothing.
        sends_always = self._sends_always and now.phase is None and now.communicate is True
        if sends_always:
            observed = [turns[0].sent(observed[0])]
        state = joined(state, keys_of(turns), observed)
        index: int | jax.Array = 0
        branches: list[Callable[[Operand], Operand]] = [lambda operand: operand]
        dues: list[Any] = []
        for number, one in enumerate(turns):
            dues.append(False)
            for events in one.options(now.phase):
                due = now.phase is not None or one.is_now(events, state.count)
                dues[-1] = either(dues[-1], due)
                which = len(branches)
                rest = tuple(event for event in events if event != SEND or not sends_always)
                branches.append(functools.partial(self._after, turns, number, rest, params, now))
                index = (
                    jnp.where(due, which, index)
                    if not isinstance(due, bool)
                    else (which if due else index)
                )
        operand = run_if(
            now.communicate,
            functools.partial(run_one_of, index, branches),
            lambda operand: operand,
            (updates, others, state),
        )
        if now.communicate is True or not self.delay:
            return operand
        updates, others, state = operand
        parts = views(keys_of(turns), state)
        for number, due in enumerate(dues):
            is_missed = jnp.logical_and(due, jnp.logical_not(now.communicate))
            flight = dropped(parts[number].in_flight, is_missed)
            parts[number] = parts[number]._replace(in_flight=flight)
        return updates, others, joined(state, keys_of(turns), parts)

    def _after(
        self,
        turns: Sequence[FragmentSteps],
        number: int,
        events: tuple[str, ...],
        params: PyTree,
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Return the operand, with the state of all fragments, after events of one."""
        updates, others, state = operand
        parts = views(keys_of(turns), state)
        after = turns[number].after(events, params, now, (updates, others, parts[number]))
        updates, others, parts[number] = after
        state = state._replace(base=parts[number].base)
        return updates, others, joined(state, keys_of(turns), parts)


def keys_of(turns: Sequence[FragmentSteps]) -> list[str]:
    """Return the keys of fragments in states; none for a single one."""
    return [one.fragment.key for one in turns] if len(turns) > 1 else []
