"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._support.types import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names
from ...transform import (
    Communicate,
    Every,
    Exchange,
    Others,
    ParameterTransform,
    decide,
    either,
    increment,
    inside,
    is_due,
    layouts_known,
    mean_and_residual,
    parameter_transform,
    phase_scope,
    replica_mean,
    require_bound,
    run_if,
)
from ...tree import added, apply_exactly, landing, subtracted, updates_to
from ._anchor import Anchor, ShardedAnchor
from ._carried import carried_state, types_on
from ._delay import nothing_in_flight
from ._fragments import ALL_LEAVES, SLOW, Fragment, Fragments, joined
from ._merge import merged
from ._state import ALONE, NO_RATE, Operand, OuterRate, OuterState
from ._turns import Turn, events_at, events_of, is_sent, turns_of, whole_anchor


@dataclass(frozen=True)
class Outer:
    """The parameter transform of an outer optimizer, with arguments that its caller has checked.

    One with a `fragment` makes the slow steps of these leaves: see `turns_of`.

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

    @property
    def is_alone(self) -> bool:
        """Whether a slow step is one exchange of all parameters, in the update that applies it."""
        return self.fragments == 1 and self.fragment is ALL_LEAVES and not self.delay

    @property
    def replaces_base(self) -> bool:
        """Whether a slow step leaves out the base's exchange of that update."""
        return self.exact_average and self.is_alone

    def turns(self, params: PyTree | None = None) -> Sequence["Outer"]:
        """Return the outer optimizer of each fragment; without `params` for its schedule alone."""
        return [self] if self.fragments == 1 else turns_of(self, params)

    def transform(self) -> ParameterTransform:
        """Return this outer optimizer as a `ParameterTransform`."""
        base, cuts = self.base, self.anchor.is_sharded
        # A base checks its own events itself, and the fragments of a function are not known yet.
        checks_events = base is ALONE and not callable(self.fragments)
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
            events=events_of(self.turns()) if checks_events else None,
            permit=None if base.permit is None else self.permit,
            anchor=lambda state, params: whole_anchor(self.turns(params), state, params),
            sized=self.sized,
            with_specs=self.with_specs,
            shards_whole_leaves=cuts and self.exchange.param_specs is None,
            shard_specs=self.exchange.param_specs if cuts else None,
            wants_learning_rate=self.rate is not None and self.rate.is_passed,
            shards=self.shards,
            carry=lambda state, params, old, new: carried_state(
                self.turns(params), state, params, old, new
            ),
            like_on=lambda state, params, at: types_on(self.turns(params), state, params, at),
            shares=lambda state: base.shares(state.base),
        )

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the events of update `t`; see `ScheduleSpec.phase`."""
        if self.is_alone:
            own: Phase = (SLOW,) if self.schedule(t) else ()
        else:
            own = tuple(event for turn in self.turns() for event in events_at(turn, t))
        # An exact average replaces the base's exchange of that update, which is left out.
        if own and self.replaces_base:
            base_events = ()
        else:
            # Gossip does not rotate in updates in which it does not exchange.
            steps = self.schedule.times(t - 1) if self.replaces_base else 0
            base_events = self.base.spec.schedule.phase(t, skipped + steps)
        return (*base_events, *own)

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything; see `ScheduleSpec.due`."""
        own = [turn.schedule(t) if self.is_alone else is_sent(turn, t) for turn in self.turns()]
        return functools.reduce(either, own, self.base.spec.schedule.due(t))

    def skipped(self, state: OuterState) -> Any:
        """Return the skips of the base other than slow steps; see `ScheduleSpec.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.replaces_base else 0
        return self.base.skipped(state.base) - slow

    def shards(self, state: OuterState) -> list[Any]:
        """Return the arrays that are sharded over replicas; see `CheckpointSpec.shards`."""
        shards = jax.tree.leaves(state.anchor) if self.anchor.is_sharded else []
        return [*shards, *self.base.shards(state.base)]

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
        first, states = OuterState(jnp.zeros([], jnp.int32), (), (), base), []
        for turn in self.turns(params):
            own = params if turn.fragment is ALL_LEAVES else turn.fragment.of(params)
            anchor = store(turn, own)
            outer = turn.anchor.pin(self.optimizer.init(anchor), own)
            flight = nothing_in_flight(own) if self.delay else ()
            states.append(first._replace(anchor=anchor, outer=outer, in_flight=flight))
        return states[0] if len(states) == 1 else joined(first, states)

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
        own_events = (SLOW,) if self.is_alone else events_of(self.turns(params))
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

        now = (weight, rate, communicate, phase)
        if not self.is_alone:
            operand = based((updates, others, state), communicate)
            return Turn.of_all(self.turns(params), params, now, operand)
        state = self.observed(state, rate)
        slow_step = functools.partial(self.slow, params, weight, rate)

        def exchanged(operand: Operand) -> Operand:
            slow = is_due(SLOW, self.schedule, state.count, communicate, phase)
            if not self.exact_average:  # the base's exchange, then the slow step
                return run_if(slow, slow_step, lambda o: o, based(operand, communicate))
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

    def slow(
        self, params: PyTree, weight: jax.Array | None, rate: jax.Array | None, operand: Operand
    ) -> Operand:
        """Make the slow step after the base's update, unless the base refuses it."""
        outer_step = functools.partial(self.outer_step, params, weight, rate)
        with phase_scope(SLOW):
            allowed, operand = self.permitted(params, operand)
            return run_if(allowed, outer_step, lambda o: o, operand)

    def permitted(self, params: PyTree, operand: Operand) -> tuple[Any, Operand]:
        """Return whether the base permits what follows, and the operand afterwards."""
        base = self.base.spec.exchange
        if not self.exact_average or base.permit is None:
            return True, operand
        # A base such as only_finite may refuse the step before anything is averaged.
        updates, others, state = operand
        axes = tuple(dict.fromkeys((*axis_names(self.exchange.axis_name), *base.axes)))
        allowed, state = self.permit(state, apply_exactly(params, updates), others, axes)
        return allowed, (updates, others, state)

    def outer_step(
        self,
        params: PyTree,
        weight: jax.Array | None,
        rate: jax.Array | None,
        operand: Operand,
    ) -> Operand:
        """Make the slow step of all leaves.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        updates, others, state = operand
        base, y, residual = self.base.spec.exchange, landing(params, updates), None
        # D, the pseudo-gradient: the displacement since the last slow step, with sign reversed.
        if self.exact_average:
            x, mass = self.numerator(y, weight, state.base)
            displacement, residual = self.displacement(x, mass, state.anchor, weight is not None)
            if others:
                others = replica_mean(others, Exchange(self.exchange.axis_name), mass)
        else:
            displacement = jax.tree.map(subtracted, state.anchor, self.anchor.average(y))
        target, anchor, state = self.stepped(params, y, displacement, residual, rate, state)
        if self.merge:
            state = state._replace(base=base.settle(state.base, self.moved(anchor)))
        elif self.exact_average:
            state = state._replace(base=base.reset(state.base))
        return updates_to(params, target), others, state

    def numerator(
        self, y: PyTree, weight: jax.Array | None, base: PyTree
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the weighted parameters and their weight, None if it is always 1."""
        # A push-sum base returns (w z, w), others (z, None), where None stands for 1.
        x, mass = self.base.spec.exchange.numerator(base, y)
        if weight is not None:
            x = jax.tree.map(lambda leaf: scaled(leaf, weight), x)
            mass = weight if mass is None else scaled(mass, weight)
        return x, mass

    def displacement(
        self, x: PyTree, mass: jax.Array | None, anchor: PyTree, may_be_idle: bool
    ) -> tuple[PyTree, PyTree | None]:
        """Return D in the anchor's form and a codec's residual, from weighted parameters."""
        if self.exchange.codec is None:
            # sum x / sum w is the exact mean of weighted and push-sum parameters too.
            average = self.anchor.average(x)
            if mass is not None:
                average = self.per_mass(average, mass, anchor if may_be_idle else None)
            return jax.tree.map(subtracted, anchor, average), None
        # Send D and not x: D is small, and a codec's rounding error is proportional to it.
        z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
        local = jax.tree.map(subtracted, anchor, z)
        return mean_and_residual(local, self.exchange, mass, role="slow")

    def per_mass(self, average: PyTree, mass: jax.Array, idle: PyTree | None) -> PyTree:
        """Return sum x / sum w of the replicas from mean x; `idle` if all have run out of data."""
        total = all_mean(mass, self.exchange.axis_name)
        if idle is None:
            return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
        return jax.tree.map(
            lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, idle
        )

    def stepped(
        self,
        params: PyTree,
        y: PyTree,
        displacement: PyTree,
        residual: PyTree | None,
        rate: jax.Array | None,
        state: OuterState,
    ) -> tuple[PyTree, PyTree, OuterState]:
        """Return the new parameters, the whole anchor, and the state after the optimizer's step."""
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
        whole = target = self.anchor.restore(anchor, params)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        if self.merge:
            target = merged(y, target, self.merge)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), params, target)
        return target, whole, state._replace(anchor=anchor, outer=outer)

    def moved(self, anchor: PyTree) -> Callable[[PyTree], PyTree]:
        """Return the function that moves a tree like the parameters as a slow step does."""

        def move(tree: PyTree) -> PyTree:
            new = merged(tree, anchor, self.merge)
            return jax.tree.map(lambda n, x: n.astype(x.dtype), new, tree)

        return move

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """Return the base's permission; see `ExchangeSpec.permit`."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)
