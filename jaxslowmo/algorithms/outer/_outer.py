"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._support.types import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names, specs_of_leaves
from ...transform import (
    Carried,
    Communicate,
    Every,
    Exchange,
    Others,
    ParameterTransform,
    StatePlacement,
    carry_leaf,
    decide,
    either,
    increment,
    inside,
    is_due,
    layouts_known,
    mean_and_residual,
    parameter_transform,
    replica_mean,
    require_bound,
    run_if,
)
from ...tree import added, landing, subtracted, updates_to, widen_updates
from ._anchor import Anchor, ShardedAnchor
from ._delay import check_turn, nothing_in_flight, within
from ._fragments import ALL_LEAVES, Fragment, Fragments, check_period, divided
from ._merge import merged
from ._turn import SEND, SLOW, TAKE, Turn


class OuterState(NamedTuple):
    """The state of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one
    in_flight: PyTree = ()  # `InFlight` with a delay; of several fragments tuples of all three


def _exchange(
    updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, Others, PyTree]:
    del params, extra
    return widen_updates(updates), others, state


# An outer step calls only its `exchange`.
ALONE = ParameterTransform(
    lambda params: (),
    optax.with_extra_args_support(optax.identity()).update,
    phase=lambda t, skipped=0: (),
    due=lambda t: False,
    schedules=(),
    exchange=_exchange,
)
"""The base of replicas that train independently between slow steps: it exchanges nothing."""


NO_RATE = -1.0  # marks a replica that has run out of data, whose optimizer has not counted on


class OuterRate(NamedTuple):
    """The source of the inner learning rate for an outer optimizer.

    Attributes:
      now: `now(count, extra)` returns the rate of an update, from the number of earlier updates and
        the extra arguments of `update`.
      observe: `observe(outer, rate)` returns the outer state after any update at this rate.
      agree: `agree(outer, rate, axes)` returns a state and a rate that are equal on all replicas,
        from rates that differ; the rate of a replica without data is `NO_RATE`.
      is_passed: whether `update` needs the argument `learning_rate`.
    """

    now: Callable[[jax.Array, Mapping[str, Any]], jax.Array]
    observe: Callable[[Any, jax.Array], Any] = lambda outer, rate: outer
    agree: Callable[..., tuple[Any, jax.Array]] = lambda outer, rate, axes: (outer, rate)
    is_passed: bool = False


Operand = tuple[PyTree, Others, OuterState]  # updates, arrays averaged with them, state


@dataclass(frozen=True)
class Outer:
    """The parameter transform of an outer optimizer, with arguments that its caller has checked.

    Attributes:
      owner: public name of the transform, for messages.
      exchange: the axes of slow steps, and the pieces in which they exchange.
      schedule: the updates in which slow steps are due.
      optimizer: the outer optimizer.
      base: the transform that runs between slow steps.
      exact_average: whether a slow step takes the replicas' mean and skips the base's exchange;
        else each replica continues with its parameters after that exchange.
      shard_state: whether each replica keeps only 1/R of the anchor.
      rate: source of the inner learning rate; None if the optimizer does not use it.
      fragments: the fragments, which take turns in the period; see `divided`.
      delay: number of updates between taking what is sent and applying its mean.
      merge: the share of a replica's own progress that a slow step keeps, in [0, 1].
      fragment: the leaves of which this is the outer optimizer; those of all fragments by default.
      known: what is known since a state was made: the number of fragments that a function makes.
    """

    owner: str
    exchange: Exchange
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    base: ParameterTransform = ALONE
    exact_average: bool = True
    shard_state: bool = True
    rate: OuterRate | None = None
    fragments: Fragments = 1
    delay: int = 0
    merge: float = 0.0
    fragment: Fragment = ALL_LEAVES
    known: dict[str, int] = field(default_factory=dict)

    @functools.cached_property
    def anchor(self) -> Anchor:
        """The anchor's storage: whole on each replica, or sharded over the replicas."""
        if self.exact_average and self.shard_state:
            return ShardedAnchor(self.exchange)
        return Anchor(self.exchange if self.exact_average else None)

    def transform(self) -> ParameterTransform:
        """Return this outer optimizer as a `ParameterTransform`."""
        base, cuts = self.base, self.anchor.is_sharded
        events = None
        if base is ALONE and not callable(self.fragments):  # a base checks its own events itself
            events = tuple(
                turn.fragment.event(name) for turn in self.turns() for name in (TAKE, SEND, SLOW)
            )
        return parameter_transform(
            self.owner,
            self.init,
            self.step,
            over=[self.exchange],
            inner=base,
            like_init=self.like_init,
            state=OuterState,
            phase=self.phase,
            skipped=None if base.skipped is None else self.skipped,
            due=self.due,
            schedules=(self.schedule, *base.schedules),
            events=events,
            permit=None if base.permit is None else self.permit,
            anchor=self.whole_anchor,
            sized=self.sized,
            with_specs=self.with_specs,
            shards_whole_leaves=cuts and self.exchange.param_specs is None,
            shard_specs=self.exchange.param_specs if cuts else None,
            wants_learning_rate=self.rate is not None and self.rate.is_passed,
            shards=self.shards,
            carry=self.carry,
            like_on=self.like_on,
            shares=lambda state: base.shares(state.base),
        )

    @property
    def is_alone(self) -> bool:
        """Whether a slow step is one exchange of all parameters."""
        return self.fragments == 1 and self.fragment.places is None and not self.delay

    @property
    def replaces_base(self) -> bool:
        """Whether a slow step sets all parameters to one mean, instead of the base's exchange."""
        return self.exact_average and self.is_alone

    @property
    def num_fragments(self) -> int:
        """The number of fragments.

        Raises:
          ValueError: it is that of a function, and no state was made yet.
        """
        if not callable(self.fragments):
            return self.fragments
        if "fragments" not in self.known:
            raise ValueError(
                f"{self.owner}: `fragments` is a function, so their number is known once a state "
                "was made: call `init` before phases are asked for."
            )
        return self.known["fragments"]

    def turns(self, params: PyTree | None = None) -> list["Outer"]:
        """Return the outer optimizer of each fragment; without `params` for its schedule alone."""
        if params is None:
            count = self.num_fragments
            fragments = [Fragment(n, () if count > 1 else None) for n in range(count)]
        else:
            fragments = list(divided(self.owner, self.fragments, params))
            count = self.known["fragments"] = len(fragments)
            check_period(self.owner, count, self.schedule)
            check_turn(self.owner, self.delay, count, self.schedule)
        if count == 1:
            return [self]
        turns = []
        for fragment in fragments:
            exchange, schedule = self.exchange, self.schedule
            if exchange.param_specs is not None and params is not None:
                specs = specs_of_leaves(exchange.param_specs, params)
                own_specs = [specs[place] for place in fragment.places or ()]
                exchange = replace(exchange, param_specs=own_specs)
            offset = schedule.offset + (fragment.number + 1) * schedule.k // count
            schedule = replace(schedule, offset=offset)
            turns.append(
                replace(self, fragment=fragment, exchange=exchange, schedule=schedule, fragments=1)
            )
        return turns

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the events of update `t`; see `ScheduleSpec.phase`."""
        own = [event for turn in self.turns() if (event := turn.event_at(t))]
        # An exact average replaces the base's exchange of that update, which is left out.
        if own and self.replaces_base:
            base_events = ()
        else:
            # Gossip does not rotate in updates in which it does not exchange.
            steps = self.schedule.times(t - 1) if self.replaces_base else 0
            base_events = self.base.spec.schedule.phase(t, skipped + steps)
        return (*base_events, *own)

    def event_at(self, t: int) -> str | None:
        """Return the event of this fragment in update `t`; None if there is none."""
        if self.schedule(t):
            return self.fragment.event(SLOW)
        if self.delay and self.schedule(t + self.delay):
            return self.fragment.event(TAKE)
        is_sending = self.delay and within(self.schedule, t, self.delay)
        return self.fragment.event(SEND) if is_sending else None

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything; see `ScheduleSpec.due`."""
        due = self.base.spec.schedule.due(t)
        for turn in self.turns():
            due = either(due, turn.schedule(t))
            if self.delay:
                due = either(due, within(turn.schedule, t, self.delay))
        return due

    def skipped(self, state: OuterState) -> Any:
        """Return the skips of the base other than slow steps; see `ScheduleSpec.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.replaces_base else 0
        return self.base.skipped(state.base) - slow

    def shards(self, state: OuterState) -> list[Any]:
        """Return the arrays that are sharded over replicas; see `CheckpointSpec.shards`."""
        shards = jax.tree.leaves(state.anchor) if self.anchor.is_sharded else []
        return [*shards, *self.base.shards(state.base)]

    def whole_anchor(self, state: OuterState, params: PyTree) -> PyTree:
        """Return the anchor of all fragments as a tree like `params`; see `LayoutSpec.anchor`."""
        whole = params
        for turn, own in self.views(state, params):
            part = turn.anchor.restore(own.anchor, turn.fragment.of(params))
            whole = turn.fragment.put(whole, part)
        return whole

    def views(self, state: OuterState, params: PyTree) -> list[tuple["Outer", OuterState]]:
        """Return the outer optimizer of each fragment with its part of the state."""
        turns = self.turns(params)
        if len(turns) == 1:
            return [(turns[0], state)]
        flights = state.in_flight or ((),) * len(turns)
        own = zip(state.anchor, state.outer, flights, strict=True)
        return [
            (turn, OuterState(state.count, anchor, outer, state.base, flight))
            for turn, (anchor, outer, flight) in zip(turns, own, strict=True)
        ]

    def sized(self, axis_sizes: Mapping[str, int]) -> ParameterTransform:
        """Return the transform for axes of these sizes; see `LayoutSpec.sized`."""
        return replace(self, base=self.base.sized(axis_sizes)).transform()

    def with_specs(self, specs: PyTree, *, of_state: bool = False) -> ParameterTransform:
        """Return the transform with `param_specs`; see `LayoutSpec.with_specs`."""
        # The layout of shards is part of the state, so only the argument `param_specs` decides it.
        keeps = self.anchor.is_sharded and not of_state
        exchange = self.exchange if keeps else self.exchange.with_specs(specs)
        return replace(self, base=self.base.with_specs(specs), exchange=exchange).transform()

    def init(self, params: PyTree) -> OuterState:
        """Return the first state for `params`."""
        if self.anchor.is_sharded:  # a whole anchor can be initialised outside of the axis
            require_bound(self.owner, self.exchange)
        return self.first_state(params, lambda turn, own: turn.anchor.store(own))

    def like_init(self, params: PyTree) -> OuterState:
        """Return a state like that of `init`, of which only shapes and dtypes matter."""
        return self.first_state(params, lambda turn, own: turn.anchor.like_stored(own))

    def first_state(self, params: PyTree, store: Callable[["Outer", PyTree], Any]) -> OuterState:
        """Return the first state, with anchors that `store` makes."""
        with layouts_known():  # the base has the same specs, so it need not warn about layouts
            base = self.base.init(params)
        states = []
        for turn in self.turns(params):
            own = turn.fragment.of(params)
            anchor = store(turn, own)
            outer = turn.anchor.pin(self.optimizer.init(anchor), own)
            flight = nothing_in_flight(own) if self.delay else ()
            states.append((anchor, outer, flight))
        if len(states) > 1:
            anchors, outers, flights = zip(*states, strict=True)
            states = [(anchors, outers, flights if self.delay else ())]
        ((anchor, outer, flight),) = states
        return OuterState(jnp.zeros([], jnp.int32), anchor, outer, base, flight)

    def step(
        self,
        updates: PyTree,
        others: Others,
        state: OuterState,
        params: PyTree,
        *,
        communicate: Communicate,
        weight: jax.Array | None,
        phase: Phase | None,
        **extra: Any,
    ) -> tuple[PyTree, Others, OuterState]:
        """Make one update; see `ExchangeSpec.exchange`."""
        rate, base = None, self.base.spec.exchange
        if self.rate is not None:
            rate = self.rate.now(state.count, extra)
            if self.rate.is_passed and weight is not None:
                # The gradient of an idle replica's rate is kept: the rate in use depends on it too.
                away = NO_RATE + (rate - jax.lax.stop_gradient(rate))
                rate = jnp.where(weight > 0, rate, away)
            if self.rate.is_passed and not base.wants_learning_rate:
                extra.pop("learning_rate")  # a user's base need not accept it
        state = state._replace(count=increment(state.count))
        views = [(turn, turn.observed(own, rate)) for turn, own in self.views(state, params)]
        own_events = {turn.fragment.event(n) for turn, _ in views for n in (TAKE, SEND, SLOW)}
        base_phase = None if phase is None else tuple(e for e in phase if e not in own_events)

        def based(
            operand: Operand, communicate: Communicate, phase: Phase | None = base_phase
        ) -> Operand:
            updates, others, state = operand
            now = {"communicate": communicate, "weight": weight, "phase": phase}
            # The arguments are checked, so the base need not warn of axes and layouts again.
            with inside(axis_names(self.exchange.axis_name)), layouts_known():
                updates, others, base_state = base.exchange(
                    updates, others, state.base, params, **now, **extra
                )
            return updates, others, state._replace(base=base_state)

        if not self.replaces_base:
            updates, others, state = based((updates, others, state), communicate)
            after = []
            for turn, own in views:
                operand = updates, others, own._replace(base=state.base)
                turn_now = Turn(turn, params, weight, rate, communicate, phase)
                updates, others, own = turn_now(operand)
                state = state._replace(base=own.base)
                after.append(own)
            return updates, others, joined(state, after)
        ((_, state),) = views
        slow_step = Turn(self, params, weight, rate, communicate, phase).slow

        def exchanged(operand: Operand) -> Operand:
            slow = is_due(SLOW, self.schedule, state.count, communicate, phase)
            # One of the two is due, so a base with one kind of exchange need not read its counter.
            of_base: Any = communicate, base_phase
            if phase is None and self.base.skipped is None:
                kinds = [kind for kind in self.base.phases() if kind]
                of_base = (True, kinds[0]) if len(kinds) == 1 else of_base
            # In a slow step the base only counts the update: its exchange would be wasted.
            return run_if(
                slow, lambda o: slow_step(based(o, False)), lambda o: based(o, *of_base), operand
            )

        # One conditional wraps both, so that a local step passes its updates through only one. It
        # also shows in the program text that a slow step leaves out the base's exchange.
        due = decide(self.due(state.count) if phase is None else bool(phase), communicate)
        return run_if(due, exchanged, lambda o: based(o, False), (updates, others, state))

    def observed(self, state: OuterState, rate: jax.Array | None) -> OuterState:
        """Return the state after any update at this rate."""
        if self.rate is None or rate is None:
            return state
        return state._replace(outer=self.rate.observe(state.outer, rate))

    def stepped(
        self,
        params: PyTree,
        displacement: PyTree,
        residual: PyTree | None,
        rate: jax.Array | None,
        operand: Operand,
    ) -> Operand:
        """Return updates and state after the outer optimizer's step with this displacement."""
        updates, others, state = operand
        outer, options = state.outer, {}
        if self.rate is not None and rate is not None:
            # With different rates the replicas would diverge, even if each keeps its own anchor.
            outer, rate = self.rate.agree(outer, rate, axis_names(self.exchange.axis_name))
            options = {"learning_rate": rate}
        # Any optax optimizer, with D as its gradient; it runs on shards of a sharded anchor.
        step, outer = self.optimizer.update(displacement, outer, state.anchor, **options)
        anchor = jax.tree.map(added, state.anchor, step)
        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        own = self.fragment.of(params)
        whole = target = self.anchor.restore(anchor, own)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        if self.merge:
            local = landing(own, self.fragment.of(updates))
            target = merged(local, target, self.merge)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), own, target)
        updates = self.fragment.put(updates, updates_to(own, target))
        base = self.settled(state.base, whole)
        return updates, others, state._replace(anchor=anchor, outer=outer, base=base)

    def settled(self, base: PyTree, anchor: PyTree) -> PyTree:
        """Return the base's state after this fragment's parameters moved to the anchor."""
        if not self.exact_average:
            return base
        if self.is_alone and not self.merge:
            return self.base.spec.exchange.reset(base)

        def moved(tree: PyTree) -> PyTree:
            local = self.fragment.of(tree)
            new = merged(local, anchor, self.merge)
            return self.fragment.put(tree, jax.tree.map(lambda n, x: n.astype(x.dtype), new, local))

        return self.base.spec.exchange.settle(base, moved)

    def displacement(
        self, y: PyTree, weight: jax.Array | None, others: Others, state: OuterState
    ) -> tuple[PyTree, PyTree | None, Others, PyTree]:
        """Return D in the anchor's form, a codec's residual, `others`, and the base's state."""
        exchange, residual = self.exchange, None
        if not self.exact_average:
            own = self.anchor.average(self.fragment.of(y))
            return jax.tree.map(subtracted, state.anchor, own), None, others, state.base
        x, mass = self.numerator(y, weight, state)
        if exchange.codec is None:
            # sum x / sum w is the exact mean of weighted and push-sum parameters too.
            average = self.anchor.average(x)
            if mass is not None:
                average = self.per_mass(average, mass, None if weight is None else state.anchor)
            displacement = jax.tree.map(subtracted, state.anchor, average)
        else:
            # Send D and not x: D is small, and a codec's rounding error is proportional to it.
            z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
            local = jax.tree.map(subtracted, state.anchor, z)
            displacement, residual = mean_and_residual(local, exchange, mass, role="slow")
        if others:
            others = replica_mean(others, Exchange(exchange.axis_name), mass)
        return displacement, residual, others, state.base

    def numerator(
        self, y: PyTree, weight: jax.Array | None, state: OuterState
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the fragment's weighted parameters and their weight; None if it is always 1."""
        # A push-sum base returns (w z, w), others (z, None), where None stands for 1.
        x, mass = self.base.spec.exchange.numerator(state.base, y)
        x = self.fragment.of(x)
        if weight is not None:
            x = jax.tree.map(lambda leaf: scaled(leaf, weight), x)
            mass = weight if mass is None else scaled(mass, weight)
        return x, mass

    def per_mass(self, average: PyTree, mass: jax.Array, idle: PyTree | None) -> PyTree:
        """Return sum x / sum w of the replicas from mean x; `idle` if all have run out of data."""
        total = all_mean(mass, self.exchange.axis_name)
        if idle is None:
            return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
        return jax.tree.map(
            lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, idle
        )

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """Return the base's permission; see `ExchangeSpec.permit`."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    def carry(
        self, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """Return the state on another placement; see `CheckpointSpec.carry`."""
        base = self.base.carry(state.base, params, old, new)
        count = carry_leaf(state.count, old, new)
        after = []
        for turn, own in self.views(state, params):
            places = [of_fragment(turn, at) for at in (old, new)]
            move = functools.partial(
                turn.anchor.carried, own.anchor, turn.fragment.of(params), *places
            )
            # Replicas' parameters are all the consensus now, and so is what they had taken.
            flight = jax.tree.map(lambda x: carry_leaf(x, old, new), own.in_flight)
            after.append(OuterState(count, move(own.anchor), move(own.outer), base.state, flight))
        note = (
            "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
            "were averaged."
            if self.anchor.exchange is None
            else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
        )
        carried = joined(OuterState(count, (), (), base.state), after)
        return Carried(carried, (note, *base.notes))

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """Return the types of the state on placement `at`; see `CheckpointSpec.like_on`."""
        # Counters have one type on every mesh; trees of the anchor's form are split as it is.
        after = []
        for turn, own in self.views(state, params):
            own_params, place = turn.fragment.of(params), of_fragment(turn, at)
            like = functools.partial(turn.anchor.like_on, own.anchor, own_params, place)
            after.append(own._replace(anchor=like(own.anchor), outer=like(own.outer)))
        base = self.base.like_on(state.base, params, at)
        return joined(state._replace(base=base), after)


def joined(state: OuterState, parts: Sequence[OuterState]) -> OuterState:
    """Return `state` with the anchors, outer states and values in flight of its fragments."""
    if len(parts) == 1:
        own = parts[0]
        return state._replace(anchor=own.anchor, outer=own.outer, in_flight=own.in_flight)
    anchors, outers, flights = zip(*[(x.anchor, x.outer, x.in_flight) for x in parts], strict=True)
    return state._replace(anchor=anchors, outer=outers, in_flight=flights if any(flights) else ())


def of_fragment(turn: Outer, at: StatePlacement) -> StatePlacement:
    """Return a placement of all parameters as one of this fragment's leaves."""
    places = turn.fragment.places
    if places is None:
        return at
    if at.form is not None:
        raise ValueError(
            f"{turn.owner}: a state with several `fragments` can't be converted from parameters in "
            "another form (`js.SavedForm`): restore it in the form in which it was saved."
        )
    specs = None if at.specs is None else tuple(at.specs[place] for place in places)
    return replace(at, specs=specs)
