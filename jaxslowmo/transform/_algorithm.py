"""Algorithms that exchange between replicas, as plain data: events that run after an update.

State is of two kinds. What each replica has for itself is *local*; what all have together, such as
an anchor and its moments, is *shared*, and has the shapes of the parameters.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._support.checks import ArgumentError
from .._support.types import Phase, PyTree
from ..mesh import Shares
from ..tree import cast, params_after_update, updates_to, widen_updates
from ._due import Communicate, Every, every, logical_or, phase_scope, run_if
from ._optax_states import move_copies
from ._replica_group import ReplicaGroup

InnerState = Literal["keep", "reset", "average"]
"""Whether an exchange keeps, resets or averages the moments of the inner optimizer."""
InnerPeriods = InnerState | Mapping[str, int | Every]
"""The same of all moments, or for each field of optax states when its moments are averaged."""


class Carry(NamedTuple):
    """The values of one replica that an event may change; `before` alone is only read.

    Attributes:
      before: the parameters before the update.
      params: the parameters after it, in at least float32: not rounded to the dtypes of `before`.
      moments: the state of the inner optimizer; None where an exchange leaves it as it is.
      statistics: further floating arrays, such as batch statistics, which are averaged whenever
        the parameters are.
      local: the algorithm's state of this replica.
      shared: the algorithm's state of all replicas; with `Algorithm.is_sharded` this replica's
        blocks of the trees that have the shapes of the parameters.
    """

    before: PyTree
    params: PyTree
    moments: PyTree = None
    statistics: Any = ()
    local: Any = ()
    shared: Any = ()


class UpdateContext(NamedTuple):
    """Facts about an update, which an event may read.

    Attributes:
      count: () int32, the number of this update, from 1; equal on all replicas.
      communicate: whether a due exchange takes place: a bool, or a () bool array equal on all
        replicas.
      weight: () float32, this replica's share in averages; None weighs all equally.
      learning_rate: () float32, the rate of the inner optimizer; None where it is not given.
      phase: the names of the events of this update; None: the program decides.
      init: the `init` of the inner optimizer; None where it is not given.
      part: `part(params)`: the part of a tree like the parameters that the inner optimizer updates.
    """

    count: Any
    communicate: Communicate = True
    weight: jax.Array | None = None
    learning_rate: Any = None
    phase: Phase | None = None
    init: Callable[[PyTree], PyTree] | None = None
    part: Callable[[PyTree], PyTree] = lambda params: params

    def form(self, name: str) -> int | None:
        """Return the number in the phase's name of this event, as 1 of "round 1"; None without."""
        words = [event.rpartition(" ") for event in self.phase or ()]
        return next((int(number) for word, _, number in words if word == name), None)


@dataclass(frozen=True)
class Event:
    """Something that an algorithm does after some updates, such as an average.

    `run(carry, replicas, context)` returns the carry afterwards. It is called inside the mapped
    axes, for one replica. The dtypes of its result are those of its argument.

    Attributes:
      name: its name in phases and reports.
      due: `due(t)`: whether it is due in update t = 1, 2, ..., an int on the host or an array in a
        program, with equal answers: `js.every(...)`.
      run: what it does.
      over: the replicas that exchange; None: all of the algorithm's.
      replaces: whether earlier events are left out in an update in which it is due.
      forms: number of forms that take turns, one per exchange: phases name them "name 0", "name 1",
        ...; 0 if their number is not known yet. None: it has one form.
      inner_state: what it does to the moments of the inner optimizer. Unless it keeps them, it does
        so itself, by `update_moments`.
      field: the field of optax states, such as "mu", whose moments it changes; None: all fields.
      missed: `missed(local, due)`: the local state after an update whose exchange is skipped, where
        `due`, a bool or a () bool array, says whether this event would have been due. None: it
        does not matter.
      is_unconditional: whether a program that decides by itself runs it in all updates, without a
        conditional: what it does where it is not due is overwritten by a later event.

    Raises:
      ValueError: `due` or `run` that is no function.
    """

    name: str
    due: Callable[[Any], Any]
    run: Callable[[Carry, ReplicaGroup, UpdateContext], Carry]
    over: ReplicaGroup | None = None
    replaces: bool = False
    forms: int | None = None
    inner_state: InnerState = "keep"
    field: str | None = None
    missed: Callable[[Any, Any], Any] | None = None
    is_unconditional: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for what is no function."""
        for name in ("due", "run"):
            if not callable(getattr(self, name)):
                raise ArgumentError(
                    name,
                    f"Event {self.name!r}: `{name}` must be a function, such as js.every(k) for "
                    f"`due`, got {getattr(self, name)!r}.",
                )

    def name_in_phase(self, number: int) -> str:
        """Return its name in a phase, in its exchange `number` = 0, 1, ..."""
        if self.forms is None:
            return self.name
        return f"{self.name} {number % self.forms if self.forms else number}"

    def matches(self, name: object) -> bool:
        """Return whether this is its name in a phase, or that of one of its forms."""
        if self.forms is None:
            return name == self.name
        word, _, form = str(name).rpartition(" ")
        return word == self.name and form.isdecimal() and int(form) < (self.forms or math.inf)


class OverlappedExchange(NamedTuple):
    """An exchange that lasts several updates, which the host can run as a separate program.

    With `js.diloco("replica", sync_every=10, delay=3)`, for example, update 7 takes the values
    ("take"), updates 8, 9 and 10 send a third of them each ("send"), and update 10 applies their
    mean ("slow"). The host may instead start `exchange` of all values before update 8. Updates 8 to
    10 then run without "send", and `with_values` puts the result into the state before update 10.

    Attributes:
      sending_events: `sending_events(phase)`: the events of the phase that send; () if the update
        sends nothing.
      values_to_send: `values_to_send(local, event)`: the part of the local state that this event
        sends.
      exchange: `exchange(values)`: what the events of all updates together make of these values,
        also if some of them have run; called inside the mapped axes, for one replica.
      with_values: `with_values(local, event, values)`: the local state with others in their place.
      is_applied: `is_applied(phase, event)`: whether the update applies what this event and earlier
        ones have sent.
      is_behind: `is_behind(local, event, t)` on the host, from the state of one replica: whether
        update t expects that earlier updates have sent more than they did.
    """

    sending_events: Callable[[Phase], Phase]
    values_to_send: Callable[[PyTree, str], PyTree]
    exchange: Callable[[PyTree], PyTree]
    with_values: Callable[[PyTree, str, PyTree], PyTree]
    is_applied: Callable[[Phase, str], bool]
    is_behind: Callable[[PyTree, str, int], bool]


def _nothing(params: PyTree) -> PyTree:
    del params
    return ()


def _identity(state: Any) -> Any:
    return state


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that exchanges between replicas.

    `js.ParameterTransform(algorithm)` is its optax transform.

    Attributes:
      events: its events, in the order in which an update runs them.
      groups: the replicas that exchange, each with its form of sending; the last one is that of
        events that name none.
      local: `local(params)`: the first state of a replica.
      shared: `shared(params)`: the first state of all replicas together. Trees like `params` in it
        are cut into blocks like the parameters, if `is_sharded`: then `params` are this replica's
        blocks.
      mass: `mass(local)`: of what the exact mean of the replicas is the weighted mean, as pairs of
        a weight, () float, and a tree like the parameters, or None for the parameters themselves;
        None instead of pairs: all replicas count equally.
      counts_alike: whether the weights of `mass` stay 1 in training, so that a plain mean is exact.
      reset: `reset(local)`: the local state after all replicas were set to one mean.
      owner: public name, for messages.
      is_sharded: whether each replica keeps only its blocks of `shared`; None: in a training step,
        where what runs on it sees whole arrays, and not inside mapped axes.
      begin: `begin(updates, local, shared, context)`: the three at the beginning of any update,
        before its events; it communicates nothing. None: as they are.
      move: `move(local, move)`: the local state after an algorithm around it has moved this
        replica's parameters. `move(tree)` does the same to any tree like the parameters, such as to
        values of them that are still under way. None: as it is.
      permit: `permit(carry, replicas)`: whether an algorithm around it may exchange between these
        replicas, () bool, equal on all, and the local state afterwards. None: always.
      has_anchor: whether its `shared` state, or `local` one, has an "anchor".
      bind: `bind(axis_sizes, params)`: the algorithm for axes of these sizes by name and for these
        parameters, of which only the types matter; either may be None. None: it depends on neither.
      needs: why its events are not known before `bind`, as a sentence; "" if they are.
      needs_rate: whether each update needs the inner optimizer's rate as `learning_rate=`.
      overlapped: the part of the exchange that may run beside several updates; None: there is none.
      count: `count(local)` on the host, from the state of one replica: the number of exchanges of
        the event with `forms` so far. None: one per update in which it is due.
    """

    events: tuple[Event, ...] = ()
    groups: tuple[ReplicaGroup, ...] = ()
    local: Callable[[PyTree], PyTree] = _nothing
    shared: Callable[[PyTree], PyTree] = _nothing
    mass: Callable[[PyTree], Shares | None] | None = None
    counts_alike: bool = False
    reset: Callable[[PyTree], PyTree] = _identity
    owner: str = "algorithm"
    is_sharded: bool | None = False
    begin: Callable[..., tuple[PyTree, PyTree, PyTree]] | None = None
    move: Callable[[PyTree, Callable[[PyTree], PyTree]], PyTree] | None = None
    permit: Callable[[Carry, ReplicaGroup], tuple[jax.Array, PyTree]] | None = None
    has_anchor: bool = False
    bind: "Callable[[Mapping[str, int] | None, PyTree | None], Algorithm] | None" = None
    needs: str = ""
    needs_rate: bool = False
    overlapped: OverlappedExchange | None = None
    count: Callable[[PyTree], int] | None = None

    def bound(
        self, axis_sizes: Mapping[str, int] | None = None, params: PyTree | None = None
    ) -> "Algorithm":
        """Return the algorithm for axes of these sizes, and for these parameters."""
        return self if self.bind is None else self.bind(axis_sizes, params)

    @property
    def inner_state(self) -> InnerState:
        """The change that its exchanges make to the moments of the inner optimizer."""
        changes: list[InnerState] = [x.inner_state for x in self.events if x.inner_state != "keep"]
        return changes[0] if changes else "keep"

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all mapped axes over which replicas exchange, of larger groups first."""
        return tuple(dict.fromkeys(name for x in reversed(self.groups) for name in x.axes))

    @property
    def bound_axes(self) -> tuple[str, ...]:
        """The names of all mapped axes over which its programs communicate."""
        local = [name for x in self.groups for name in x.bound_axes]
        return tuple(dict.fromkeys((*self.axes, *local)))

    # What follows from the list of events.

    def known_events(self) -> tuple[Event, ...]:
        """Return the events; raise `ValueError` where they are not known yet."""
        if self.needs:
            raise ValueError(f"{self.owner}: {self.needs}")
        return self.events

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return, on the host, the names of the events of update t = 1, 2, ...; () for none.

        Args:
          t: number of the update.
          skipped: number of updates before t whose exchange was skipped (`communicate=False`), in
            which forms do not take turns.
        """
        due: list[str] = []
        events = self.known_events()
        for i, event in enumerate(events):
            if event.due(t):
                due = [] if event.replaces else due
                number = 0
                if event.forms is not None:
                    number = _num_exchanges(event, events[i + 1 :], t - 1) - skipped
                due.append(event.name_in_phase(number))
        return tuple(due)

    def skip_count(self, local: PyTree, t: int) -> int:
        """Return the `skipped` of `phase` from the local state of one replica after update t."""
        for i, event in enumerate(self.events):
            if event.forms is not None and self.count is not None:
                return _num_exchanges(event, self.events[i + 1 :], t) - self.count(local)
        return 0

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything, for an int or an array."""
        return functools.reduce(logical_or, (event.due(t) for event in self.known_events()), False)

    @property
    def schedules(self) -> tuple[Every, ...]:
        """The schedules on which its phases depend; forms take turns, as if by another one."""
        events = self.known_events()
        schedules = [x.due for x in events if isinstance(x.due, Every)]
        return (*dict.fromkeys(schedules), *(every(x.forms) for x in events if x.forms))

    def run(
        self,
        updates: PyTree | None,
        carry: Carry,
        context: UpdateContext,
        with_layout: Callable[[ReplicaGroup], ReplicaGroup] = lambda group: group,
    ) -> tuple[PyTree, Carry]:
        """Return the updates, and the carry, after all that is due in an update.

        Args:
          updates: the optimizer's updates, in at least float32; `carry.params` is not read then.
            None: `carry.params` holds the parameters after the update, each leaf in its own dtype
            or, if it is not rounded to that yet, in at least float32.
          carry: the carry before the events.
          context: facts about the update.
          with_layout: `with_layout(group)`: a group of replicas for the arrays of this call.

        Returns:
          With `updates`, the updates that lead to the new parameters, in at least float32, and the
          carry, whose `params` must not be read. With None, None, and the carry with the new
          parameters in their own dtypes.
        """
        before, events = carry.before, list(self.events)
        if context.phase is not None:
            events = [event for event in events if any(map(event.matches, context.phase))]
        pairs = [(x, context.phase is not None or _is_due(x, context)) for x in events]

        def call(event: Event, carry: Carry) -> Carry:
            # No event changes `before`. It is left out of carries that go through conditionals,
            # which would copy it.
            replicas = with_layout(event.over or self.groups[-1])
            # Forms that take turns name their scopes themselves.
            with phase_scope(event.name) if event.forms is None else nullcontext():
                new = event.run(carry._replace(before=before), replicas, context)
            if carry.moments is not None and event.inner_state == "keep":
                # Copies of parameters in the optimizer must move too: it would undo the exchange.
                old = rounded_params(carry._replace(before=before))
                moved = move_copies(carry.moments, *map(context.part, (old, rounded_params(new))))
                new = new._replace(moments=moved)
            return new._replace(before=())

        def exchange(
            operand: tuple[PyTree, Carry], run: Callable[[Carry], Carry]
        ) -> tuple[PyTree, Carry]:
            updates, carry = operand
            # Widened here, so that the conditional takes the arrays as they are, without copies.
            y = (
                widen_updates(carry.params)
                if updates is None
                else params_after_update(before, updates)
            )
            new = run(carry._replace(params=y))
            target = rounded_params(new._replace(before=before))
            if updates is None:
                like = jax.tree.map(lambda t, x: t.astype(x.dtype), target, carry.params)
                return None, new._replace(params=like)
            return updates_to(before, target), new._replace(params=())

        def skip(operand: tuple[PyTree, Carry]) -> tuple[PyTree, Carry]:
            updates, carry = operand
            for event, due in pairs:
                if event.missed is not None:
                    carry = carry._replace(local=event.missed(carry.local, due))
            return updates, carry

        # An example: events "average", every 2 updates, and "slow", every 4, which replaces it.
        #   updates 1 and 3: number 0, no branch;
        #   update 2: number 1, the branch of the events that may be replaced: "average";
        #   update 4: number 2, the branch of the event that replaces: "slow" alone.
        number, runs = self._alternatives(pairs, call)
        number = _choice(context.communicate, number, 0)
        branches = [functools.partial(exchange, run=run) for run in runs]
        operand = updates, carry._replace(before=())
        if context.communicate is not True and any(event.missed for event in events):
            operand = run_if(number == 0, skip, _identity, operand, axes=self.bound_axes)
        # One conditional after the other: in place of one in the other, or of one with more than
        # two branches, XLA copies what passes through.
        for i, branch in enumerate(branches, 1):
            operand = run_if(number == i, branch, _identity, operand, axes=self.bound_axes)
        updates, carry = operand
        if updates is None:
            carry = carry._replace(params=rounded_params(carry._replace(before=before)))
        return updates, carry

    def _alternatives(
        self, events: Sequence[tuple[Event, Any]], call: Callable[[Event, Carry], Carry]
    ) -> tuple[Any, list[Callable[[Carry], Carry]]]:
        """Return the number of the branch to run, and the branches 1, 2, ...; 0 runs none.

        Each replacing event at the end of the list is a branch by itself. The events before these
        are one branch, the first, which runs those of them that are due.
        """
        num_replacing = len([*itertools.takewhile(lambda x: x[0].replaces, reversed(events))])
        earlier, last = events[: len(events) - num_replacing], events[len(events) - num_replacing :]
        number: Any = 0
        runs: list[Callable[[Carry], Carry]] = []
        if earlier:
            number = _choice(functools.reduce(logical_or, (due for _, due in earlier)), 1, 0)
            runs = [functools.partial(self._run, earlier, call, is_any=True)]
        for event, due in last:
            runs.append(functools.partial(call, event))
            number = _choice(due, len(runs), number)
        return number, runs

    def _run(
        self,
        events: Sequence[tuple[Event, Any]],
        call: Callable[[Event, Carry], Carry],
        carry: Carry,
        *,
        is_any: bool = False,
    ) -> Carry:
        """Run those of these events that are due; with `is_any` at least one of them is."""
        *before, (event, due) = events
        if event.replaces:
            number, runs = self._alternatives(events, call)
            for i, run in enumerate(runs, 1):
                carry = run_if(number == i, run, _identity, carry, axes=self.bound_axes)
            return carry
        if before:
            carry = self._run(before, call, carry)
        due = True if is_any and not before else due
        return run_if(due, functools.partial(call, event), _identity, carry, axes=self.bound_axes)


def rounded_params(carry: Carry) -> PyTree:
    """Return the parameters after the update in their own dtypes."""
    return jax.tree.map(lambda y, p: cast(y, p.dtype), carry.params, carry.before)


def wrap_algorithm(base: Algorithm) -> Algorithm:
    """Return an algorithm that acts like `base`, whose local state is the "base" of its own.

    Its shared state is that of `base`. `dataclasses.replace` changes what it does differently.
    """

    def begin(updates: PyTree, local: Any, shared: Any, context: UpdateContext) -> Any:
        assert base.begin is not None
        updates, inner, shared = base.begin(updates, local["base"], shared, context)
        return updates, local | {"base": inner}, shared

    def move(local: Any, move: Callable[[PyTree], PyTree]) -> Any:
        assert base.move is not None
        return local | {"base": base.move(local["base"], move)}

    def permit(carry: Carry, replicas: ReplicaGroup) -> tuple[jax.Array, Any]:
        assert base.permit is not None
        allowed, inner = base.permit(carry._replace(local=carry.local["base"]), replicas)
        return allowed, carry.local | {"base": inner}

    def on_base(fn: Callable[[Any], Any] | None) -> Any:
        return None if fn is None else lambda local: fn(local["base"])

    return replace(
        base,
        events=tuple(_wrap_event(event, base.groups[-1]) for event in base.events),
        local=lambda params: {"base": base.local(params)},
        mass=on_base(base.mass),
        reset=lambda local: local | {"base": base.reset(local["base"])},
        begin=base.begin and begin,
        move=base.move and move,
        permit=base.permit and permit,
        bind=base.bind and (lambda sizes, params: wrap_algorithm(base.bound(sizes, params))),
        overlapped=None,
        count=on_base(base.count),
    )


def _wrap_event(event: Event, group: ReplicaGroup) -> Event:
    """Return an event of a wrapped algorithm, whose local state is the "base" of the whole."""

    def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext) -> Carry:
        inner = event.run(carry._replace(local=carry.local["base"]), replicas, context)
        return inner._replace(local=carry.local | {"base": inner.local})

    missed = event.missed

    def skip(local: Any, due: Any) -> Any:
        assert missed is not None
        return local | {"base": missed(local["base"], due)}

    return replace(event, run=run, over=event.over or group, missed=missed and skip)


def _is_due(event: Event, context: UpdateContext) -> Any:
    is_static = isinstance(event.due, Every) and event.due.is_always
    if is_static or (event.is_unconditional and context.communicate is True):
        return True
    return event.due(context.count)


def _choice(due: Any, number: Any, otherwise: Any) -> Any:
    """Return `number if due else otherwise`: an int where that is static, else an array."""
    if isinstance(due, bool):
        return number if due else otherwise
    return jnp.where(due, number, otherwise)


def _num_exchanges(event: Event, later: Sequence[Event], t: int) -> int:
    """Return in how many of the updates 1 to `t` an event runs, not replaced by a later one."""
    replacing = [x.due for x in later if x.replaces]
    if not replacing:
        return _num_due(event.due, t)
    if len(replacing) == 1 and isinstance(event.due, Every) and event.due.is_always:
        return t - _num_due(replacing[0], t)  # without a loop, since the host asks in every update
    return sum(bool(event.due(i)) and not any(due(i) for due in replacing) for i in range(1, t + 1))


def _num_due(due: Callable[[Any], Any], t: int) -> int:
    """Return how many of the updates 1 to `t` are due."""
    return due.times(t) if isinstance(due, Every) else sum(bool(due(i)) for i in range(1, t + 1))
