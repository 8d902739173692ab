"""The base class of algorithms that exchange parameters between replicas, and their events."""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax

from .._support.types import Phase, PyTree
from ..mesh import axis_names
from ..tree import widen_updates
from ._due import Communicate, Every, decide, either, every, increment, phase_scope, run_if
from ._replica_exchange import Exchange
from ._state_classes import register_state
from ._transform_states import Carried, StatePlacement, carry_leaf

InnerState = Literal["keep", "reset", "average"]
"""Whether an exchange keeps, resets or averages the moments of the inner optimizer."""

Others = list[Any]
"""Floating arrays that are averaged with the parameters, such as batch statistics.

If `Sync.inner_state` is not "keep", a mark follows: False, and True after its exchange."""

Operand = tuple[PyTree, Others, PyTree]
"""`(updates, others, state)`: what an update of a parameter transform changes."""

Numerator = tuple[PyTree, jax.Array | None]
"""Weighted parameters and their weight; None if it is always 1."""


class Now(NamedTuple):
    """The arguments of the current update, which an event may read.

    Attributes:
      params: the parameters before the update.
      count: () int32, the number of this update, from 1; equal on all replicas.
      communicate: whether a due exchange takes place: a bool, or a () bool array equal on all
        replicas.
      weight: () float32, this replica's share in averages; None weighs all equally.
      phase: the names of the events of this update; None: the program decides.
      extra: other arguments of `update`, such as `learning_rate`.
    """

    params: PyTree
    count: jax.Array
    communicate: Communicate = True
    weight: jax.Array | None = None
    phase: Phase | None = None
    extra: Mapping[str, Any] = {}

    def form(self, name: str) -> int | None:
        """Return the number in the phase's name of this event, as 1 of "round 1"; None without."""
        words = [event.rpartition(" ") for event in self.phase or ()]
        return next((int(number) for word, _, number in words if word == name), None)


@dataclass(frozen=True)
class Event:
    """Something that an algorithm does in some updates, such as an average.

    Let y be the parameters after the optimizer's update. `run((updates, others, state), now)`
    returns the three afterwards, where `updates` is what is added to `now.params`, and `others`
    are further floating arrays: average them if you average y, else return them as they are. It is
    called inside the mapped axes, for one replica, and traced under `js.spec.phase_scope(name)`;
    with `forms` it opens that scope itself, by the name of the form that it runs.

    Attributes:
      name: its name in phases and reports.
      due: `due(t)`: whether it is due in update t = 1, 2, ..., an int on the host or an array in a
        program, with equal answers: `js.every(...)`. `phases` and reports do not know the period of
        another function: an algorithm that uses one overrides `Sync.schedules`.
      run: what it does. Its updates have at least float32, unless it replaces what is before it.
      replaces: whether an update in which it is due leaves out what comes before it: earlier
        events, and `Sync.local`.
      forms: number of forms that take turns, one per exchange: phases name them "name 0", "name 1",
        ...; 0 if their number is not known yet. None: it has one form.
      missed: `missed(operand, due, now)`: the operand of an update whose exchange is skipped, where
        `due`, a bool or a () bool array, says whether this event would have been due. None: it
        does not matter.
      is_unconditional: whether a program that decides by itself runs it in all updates, without a
        conditional: what it does where it is not due is overwritten by a later event.

    Raises:
      ValueError: `due` or `run` that is no function.
    """

    name: str
    due: Callable[[Any], Any]
    run: Callable[[Operand, Now], Operand]
    replaces: bool = False
    forms: int | None = None
    missed: Callable[[Operand, Any, Now], Operand] | None = None
    is_unconditional: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for what is no function."""
        for name in ("due", "run"):
            if not callable(getattr(self, name)):
                raise ValueError(
                    f"Event {self.name!r}: `{name}` must be a function, such as js.every(k) for "
                    f"`due`, got {getattr(self, name)!r}."
                )

    def named(self, number: int) -> str:
        """Return its name in a phase, in its exchange `number` = 0, 1, ..."""
        if self.forms is None:
            return self.name
        return f"{self.name} {number % self.forms if self.forms else number}"

    def is_called(self, name: object) -> bool:
        """Return whether this is its name in a phase, or that of one of its forms."""
        if self.forms is None:
            return name == self.name
        word, _, form = str(name).rpartition(" ")
        return word == self.name and form.isdecimal() and int(form) < (self.forms or math.inf)

    def applied(self, operand: Operand, now: Now) -> Operand:
        """Run it; its updates have at least float32 afterwards, as those of `Sync.local`."""
        updates, others, state = self.run(operand, now)
        return widen_updates(updates), others, state

    def scoped(self, operand: Operand, now: Now) -> Operand:
        """Run it under its name; forms that take turns name themselves."""
        if self.forms is not None:
            return self.applied(operand, now)
        with phase_scope(self.name):
            return self.applied(operand, now)


class Beside(NamedTuple):
    """An exchange that lasts several updates, which the host can run as a separate program.

    Attributes:
      without: `without(phase)`: the phase without the events that send; the same phase if an update
        sends nothing.
      sent: `sent(state, phase)`: the part of the state that the events of this phase send.
      exchange: `exchange(values)`: what the events of all updates together make of `sent`, also
        if some of them have run; called inside the mapped axes, for one replica.
      put: `put(state, phase, values)`: the state with `values` in the place of `sent`.
      ends: `ends(phase)`: whether the update applies what its events and earlier ones have sent.
      is_behind: `is_behind(state, t)` on the host, from the state of one replica: whether update t
        expects that earlier updates have sent more than they did.
    """

    without: Callable[[Phase], Phase]
    sent: Callable[[PyTree, Phase], PyTree]
    exchange: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, Phase, PyTree], PyTree]
    ends: Callable[[Phase], bool]
    is_behind: Callable[[PyTree, int], bool]


class Sync:
    """An algorithm that exchanges the parameters of replicas.

    `js.ParameterTransform(sync)` is its optax transform.

    A subclass, as a rule a frozen dataclass of its arguments, names `owner`, `state` and `axes`,
    makes its state by `init`, and lists its `events`. All else has a default that holds for an
    algorithm without an anchor, without weights of its own and with a state of equal counters.

    Attributes:
      owner: public name of the transform, for messages.
      state: class of its state, a NamedTuple that no other algorithm uses, with a field `count`:
        () int32, the number of updates so far.
      packs: whether it packs leaves into the buffers of its `groups`, and so needs to know how
        leaves are sharded.
      inner_state: what its exchange does to the moments of the inner optimizer.
    """

    owner: str
    state: ClassVar[type]
    packs: ClassVar[bool] = False
    inner_state: InnerState = "keep"

    def __init_subclass__(cls) -> None:
        """Register the class of its state, by which chains and checkpoints know it."""
        super().__init_subclass__()
        if "state" in cls.__dict__:
            register_state(cls.state, "parameters", needs_owner=cls.needs_owner())

    @classmethod
    def needs_owner(cls) -> bool:
        """Return whether a state cannot be converted leaf by leaf for other replicas."""
        return cls.carry is not Sync.carry

    def missing(self) -> list[str]:
        """Return what a subclass must say and this one does not."""
        kind, fields = type(self), getattr(getattr(self, "state", None), "_fields", ())
        checks = {
            "`owner`": hasattr(self, "owner"),
            "`state`, a NamedTuple with a `count`": "count" in fields,
            "`axes`": kind.axes is not Sync.axes or kind.groups is not Sync.groups,
            "`init`": kind.init is not Sync.init,
            "`events`": kind.events is not Sync.events,
        }
        return [name for name, is_said in checks.items() if not is_said]

    # What an algorithm says of itself.

    @property
    def wrapped(self) -> "Sync | None":
        """The algorithm that it wraps, which exchanges too; None: there is none."""
        return None

    @property
    def groups(self) -> Sequence[Exchange]:
        """The groups of replicas that exchange, smallest first, each with the axes of the last."""
        return (Exchange(self.axes),)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of all mapped axes over which it, or what it wraps, exchanges."""
        own = axis_names(self.groups[-1].axis_name)
        return tuple(dict.fromkeys((*own, *(self.wrapped.axes if self.wrapped else ()))))

    @property
    def local_axes(self) -> tuple[str, ...]:
        """Names of axes inside a replica, whose devices split the work of an exchange."""
        own = [name for group in self.groups for name in axis_names(group.local_axis_name or ())]
        inner = self.wrapped.local_axes if self.wrapped else ()
        return tuple(dict.fromkeys((*own, *inner)))

    @property
    def bound_axes(self) -> tuple[str, ...]:
        """Names of all mapped axes over which its programs communicate."""
        return tuple(dict.fromkeys((*self.axes, *self.local_axes)))

    def init(self, params: PyTree) -> PyTree:
        """Return the first state for `params`, whose leaves are floating."""
        raise NotImplementedError

    def like_init(self, params: PyTree) -> PyTree:
        """Return a state with the types of `init`, where that can be traced faster."""
        return self.init(params)

    def events(self) -> Sequence[Event]:
        """Return its events, in the order in which an update runs them."""
        raise NotImplementedError

    # What its updates do beside the events.

    def counted(self, state: PyTree, now: Now) -> PyTree:
        """Return the state at the beginning of any update: its counter goes on by one."""
        del now
        return state._replace(count=increment(state.count))

    def local(self, operand: Operand, now: Now) -> Operand:
        """Return the operand of an update without an exchange, with updates in at least float32."""
        del now
        updates, others, state = operand
        return widen_updates(updates), others, state

    @property
    def wants_learning_rate(self) -> bool:
        """Whether each update needs the optimizer's rate as `learning_rate=`."""
        return False

    @property
    def beside(self) -> Beside | None:
        """The part of the exchange that may run beside several updates; None: there is none."""
        return None

    # What an algorithm that wraps it asks.

    def numerator(self, state: PyTree, y: PyTree) -> Numerator:
        """Return `(x, w)` of this replica, with which sum x / sum w is the exact mean of all.

        The default is `(y, None)`, where None stands for 1. Push-sum has w * y and its weight w.

        Args:
          state: its state.
          y: the parameters after the optimizer's update.
        """
        del state
        return y, None

    def reset(self, state: PyTree) -> PyTree:
        """Return the state after all replicas were set to one mean."""
        return state

    def settle(self, state: PyTree, move: Callable[[PyTree], PyTree]) -> PyTree:
        """Return the state after an algorithm around it has moved this replica's parameters.

        `move(tree)` does the same to any tree like the parameters, such as to values of them that
        the state holds since they are still under way.
        """
        del move
        return state

    def permit(
        self, state: PyTree, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, PyTree]:
        """Return `(allowed, state)` before an algorithm that wraps it exchanges over `axes`.

        The exchange takes place if `allowed`, a bool or a () bool array, which must be equal on all
        replicas.

        Args:
          state: its state.
          y: the parameters after the optimizer's update.
          others: the arrays that are averaged with them.
          axes: names of the axes over which to ask.
        """
        del y, others, axes
        return True, state

    # What depends on the mesh.

    @property
    def shards_whole_leaves(self) -> bool:
        """Whether it keeps shards over replicas, cut from whole leaves since it has no specs.

        A leaf that is sharded over Auto axes inside a replica is then gathered first: its type does
        not say how it is sharded. Types over Explicit axes do.
        """
        return False

    @property
    def shard_specs(self) -> PyTree | None:
        """`PartitionSpec` per leaf (or prefix of the tree) by which it cuts leaves into shards.

        It is part of the layout of its state. None: it cuts none.
        """
        return None

    @property
    def stored(self) -> str:
        """Where its state is stored, and why; "" if every replica has all of it in any case."""
        return ""

    def sized(self, axis_sizes: Mapping[str, int]) -> "Sync":
        """Return it for axes with these sizes by name, if it depends on them."""
        del axis_sizes
        return self

    def on(self, params: PyTree) -> Self:
        """Return it for these parameters, of which only the types matter, if it depends on them."""
        del params
        return self

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> "Sync":
        """Return it for parameters with this layout over automatic axes.

        It keeps specs that it was made with, and the layout of its state. If `shards_whole_leaves`,
        `of_state` changes the layout of the state, too; no state may exist yet.
        """
        del param_specs, of_state
        return self

    # Its state in checkpoints and on other meshes.

    def skipped(self, state: PyTree) -> int:
        """Return the `skipped` of `phase`, from the state of one replica on the host."""
        del state
        return 0

    @property
    def has_anchor(self) -> bool:
        """Whether its state has an anchor, which `anchor` returns."""
        return False

    def anchor(self, state: PyTree, params: PyTree) -> PyTree:
        """Return the anchor as a tree like the parameters, gathered from its shards.

        It is called inside the mapped axes, if `has_anchor`.
        """
        raise NotImplementedError

    def shards(self, state: PyTree) -> list[Any]:
        """Return the leaves of a state of which each replica keeps a different part."""
        del state
        return []

    def division(self, params: PyTree) -> Mapping[str, Any] | None:
        """Return, on the host, how its state divides the parameters, as plain JSON.

        Checkpoints record it, and `StatePlacement.division` brings it back to `carry` and
        `like_on`. `params` are types like the parameters, which may be stacked over replicas. None:
        it does not divide them.
        """
        del params
        return None

    def carry(
        self, state: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """Convert the state of all replicas to another placement, on the host.

        The default converts leaf by leaf: floats are averaged if replicas differ.

        Args:
          state: NumPy arrays stacked on placement `old`.
          params: one copy of the parameters, NumPy arrays: the consensus, from which all replicas
            go on. If the number of replicas is the same, they go on from their own parameters, and
            only the layout changes.
          old: the placement of `state`.
          new: the placement of the result.
        """
        del params
        return Carried(jax.tree.map(lambda x: carry_leaf(x, old, new), state))

    def like_on(self, state: PyTree, params: PyTree, at: StatePlacement) -> PyTree:
        """Return the types of a state of all replicas on placement `at`, on the host.

        The default is `state`: only shards have another shape there.
        """
        del params, at
        return state

    def shares(self, state: PyTree) -> Sequence[tuple[Any, PyTree | None]] | None:
        """Return, on the host, of what the consensus is the weighted mean, for `js.consensus`.

        They are pairs: a weight for each replica, and stacked parameters, or None for the replicas'
        current ones. None instead of pairs: all replicas count equally.
        """
        del state
        return [(1.0, None)]

    # What follows from the list of events.

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return, on the host, the names of the events of update t = 1, 2, ...; () for none.

        Args:
          t: number of the update.
          skipped: number of updates before t whose exchange was skipped (`communicate=False`), in
            which forms do not take turns; see `Sync.skipped`.
        """
        due: list[str] = []
        events = self._events
        for i, event in enumerate(events):
            if event.due(t):
                due = [] if event.replaces else due
                number = 0
                if event.forms is not None:
                    # Nor do they in updates in which a later event replaces them.
                    replaced = (_times(x.due, t - 1) for x in events[i + 1 :] if x.replaces)
                    number = t - 1 - skipped - sum(replaced)
                due.append(event.named(number))
        return tuple(due)

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything, for an int or an array."""
        return functools.reduce(either, (event.due(t) for event in self._events), False)

    @property
    def schedules(self) -> tuple[Every, ...]:
        """The schedules on which its phases depend."""
        found = [x.due for x in self._events if isinstance(x.due, Every)]
        return (*found, *(every(x.forms) for x in self._events if x.forms))

    def step(self, operand: Operand, now: Now) -> Operand:
        """Return the operand after one update: all that is due of its events."""
        updates, others, state = operand
        operand = updates, others, self.counted(state, now)
        events = list(self._events)
        if now.phase is not None:
            events = [event for event in events if any(map(event.is_called, now.phase))]
        dues = [now.phase is not None or self._is_due(event, now) for event in events]
        due = functools.reduce(either, dues, False)

        def exchanged(operand: Operand) -> Operand:
            return self._run([*zip(events, dues, strict=True)], operand, now, is_any=True)

        def skipped(operand: Operand) -> Operand:
            operand = self.local(operand, now)
            for event, due in zip(events, dues, strict=True):
                if event.missed is not None and now.communicate is not True:
                    operand = event.missed(operand, due, now)
            return operand

        # One conditional around all, so that a local update passes through no other.
        due = decide(due, now.communicate)
        return run_if(due, exchanged, skipped, operand, axes=self.bound_axes)

    def _run(
        self, events: list[tuple[Event, Any]], operand: Operand, now: Now, *, is_any: bool
    ) -> Operand:
        """Run what is due of these events, one of which is if `is_any`.

        Later events decide first, since they may replace what is before them.
        """
        if not events:
            return self.local(operand, now)
        *before, (event, due) = events
        run = functools.partial(event.scoped, now=now)
        due = True if is_any and not before else due
        if event.replaces:
            earlier = functools.partial(self._run, before, now=now, is_any=is_any)
            return run_if(due, run, earlier, operand, axes=self.bound_axes)
        operand = self._run(before, operand, now, is_any=False)
        return run_if(due, run, lambda operand: operand, operand, axes=self.bound_axes)

    def _is_due(self, event: Event, now: Now) -> Any:
        is_static = isinstance(event.due, Every) and event.due.is_always
        if is_static or (event.is_unconditional and now.communicate is True):
            return True
        return event.due(now.count)

    @property
    def _events(self) -> tuple[Event, ...]:
        # Every step on the host asks for them several times.
        variant = self.variant
        if variant not in self._listed:
            self._listed[variant] = tuple(self.events())
        return self._listed[variant]

    @functools.cached_property
    def _listed(self) -> dict[Hashable, tuple[Event, ...]]:
        return {}

    @property
    def variant(self) -> Hashable:
        """What its events depend on beside its arguments; their list is kept for each value.

        An example is the number of fragments, if a function of the user's decides it.
        """
        return None if self.wrapped is None else self.wrapped.variant

    def layers(self) -> Iterator["Sync"]:
        """Yield it and all that it wraps, outermost first."""
        yield self
        if self.wrapped is not None:
            yield from self.wrapped.layers()

    def lifted(self, event: Event, field: str) -> Event:
        """Return an event of what it wraps, whose state is this field of its own."""
        missed = event.missed and functools.partial(in_field, event.missed, field)
        return replace(event, run=functools.partial(in_field, event.run, field), missed=missed)


def in_field(run: Callable[..., Operand], field: str, operand: Operand, *args: Any) -> Operand:
    """Return `run(operand, *args)` for an operand whose state is this field of the state."""
    updates, others, state = operand
    updates, others, inner = run((updates, others, getattr(state, field)), *args)
    return updates, others, state._replace(**{field: inner})


def inner_changer(sync: Sync) -> Sync | None:
    """Return the algorithm, `sync` or one in it, that changes moments of the inner optimizer."""
    return next((x for x in sync.layers() if x.inner_state != "keep"), None)


def split_mark(sync: Sync, others: Others) -> tuple[Others, Others]:
    """Return the arrays in `others`, and the mark of an algorithm, [] if it keeps the moments."""
    count = len(others) - (sync.inner_state != "keep")
    return others[:count], others[count:]


def _times(due: Callable[[Any], Any], t: int) -> int:
    """Return how many of the updates 1 to `t` are due."""
    return due.times(t) if isinstance(due, Every) else sum(bool(due(i)) for i in range(1, t + 1))
