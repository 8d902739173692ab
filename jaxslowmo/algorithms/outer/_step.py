"""An outer optimizer over what the replicas have done since the last slow step.

SlowMo and DiLoCo are this machinery with different outer optimizers. `Outer` says when and over
what; `OuterStep`, one update of it, what is done.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._typing import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names
from ...transform import (
    Carried,
    Communicate,
    Every,
    Exchange,
    Others,
    ParameterTransform,
    Placement,
    carry_leaf,
    decide,
    either,
    increment,
    inside,
    is_due,
    known_exchange,
    layouts_known,
    parameter_transform,
    phase_scope,
    replica_mean,
    require_bound,
    run_if,
)
from ...tree import (
    added,
    apply_exactly,
    landing,
    subtracted,
    updates_to,
)
from ._alone import ALONE
from ._anchor import OwnAnchor, WholeAnchor
from ._coded import coded_displacement
from ._sharded import ShardedAnchor
from ._state import OuterState

SLOW = "slow"
NO_RATE = -1.0  # of a replica that has run out of data: its optimizer has not counted on


class OuterRate(NamedTuple):
    """What an outer optimizer is told of the inner learning rate.

    Attributes:
      now: `now(count, told)`: the rate of an update, from how many were before and from what else
        `update` was given.
      observe: `observe(outer, rate)`: the outer state after an update at this rate, slow or not;
        None where it stays.
      agree: `agree(outer, rate, axes)`: state and rate as one for replicas of which each was told
        its own; it is `NO_RATE` where nothing was moved. None where all are told one.
      is_told: whether `update` must be given `learning_rate=`.
    """

    now: Callable[[jax.Array, Mapping[str, Any]], jax.Array]
    observe: Callable[[Any, jax.Array], Any] | None = None
    agree: Callable[[Any, jax.Array, tuple[str, ...]], tuple[Any, jax.Array]] | None = None
    is_told: bool = False


Operand = tuple[PyTree, Others, OuterState]  # updates, what travels along, state


@dataclass(frozen=True)
class Outer:
    """The parameter transform of an outer optimizer; arguments are checked by who makes it.

    Attributes:
      owner: its public name.
      exchange: what slow steps exchange over.
      schedule: when they are due.
      optimizer: the outer optimizer.
      base: what runs between slow steps.
      exact_average: the replicas' mean is taken and the base's own exchange skipped; else each goes
        on from what the base left on it.
      shard_state: whether each replica keeps 1/R of the anchor.
      rate: what the optimizer is told of the inner learning rate; None for nothing.
    """

    owner: str
    exchange: Exchange
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    base: ParameterTransform = ALONE
    exact_average: bool = True
    shard_state: bool = True
    rate: OuterRate | None = None

    @functools.cached_property
    def anchor(self) -> OwnAnchor:
        """Where the anchor lives."""
        if not self.exact_average:
            return OwnAnchor()
        return (ShardedAnchor if self.shard_state else WholeAnchor)(self.exchange)

    def transform(self) -> ParameterTransform:
        """As the protocol wants it."""
        base, cuts = self.base, self.anchor.is_sharded
        return parameter_transform(
            self.owner,
            self.init,
            self.step,
            over=[self.exchange],
            inner=base,
            like_init=lambda params: self.of_anchor(self.anchor.like_stored(params), params),
            state=OuterState,
            phase=self.phase,
            skipped=None if base.skipped is None else self.skipped,
            due=self.due,
            schedules=(self.schedule, *base.schedules),
            events=(SLOW,) if base is ALONE else None,  # a base checks its own part of the phase
            permit=None if base.permit is None else self.permit,
            anchor=lambda state, params: self.anchor.restore(state.anchor, params),
            sized=self.sized,
            with_specs=self.with_specs,
            shards_whole_leaves=cuts and self.exchange.param_specs is None,
            shard_specs=self.exchange.param_specs if cuts else None,
            wants_learning_rate=self.rate is not None and self.rate.is_told,
            shards=self.shards,
            carry=self.carry,
            like_on=self.like_on,
            shares=lambda state: base.shares(state.base),
        )

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """See `ScheduleSpec.phase`."""
        slow = bool(self.schedule(t))
        # An exact average makes the base's own exchange of that update a waste: it is left out.
        if slow and self.exact_average:
            own = ()
        else:
            # Gossip does not rotate in updates in which it did not exchange.
            steps = self.schedule.times(t - 1) if self.exact_average else 0
            own = self.base.spec.schedule.phase(t, skipped + steps)
        return (*own, SLOW) if slow else own

    def due(self, t: Any) -> Any:
        """See `ScheduleSpec.due`."""
        slow = self.schedule(t)
        return either(self.base.spec.schedule.due(t), slow)

    def skipped(self, state: OuterState) -> Any:
        """See `ScheduleSpec.skipped`: the base's, slow steps apart."""
        slow = self.schedule.times(int(state.count)) if self.exact_average else 0
        return self.base.skipped(state.base) - slow

    def shards(self, state: OuterState) -> list[Any]:
        """See `CheckpointSpec.shards`."""
        own = jax.tree.leaves(state.anchor) if self.anchor.is_sharded else []
        return [*own, *self.base.shards(state.base)]

    def sized(self, axis_sizes: Mapping[str, int]) -> ParameterTransform:
        """See `LayoutSpec.sized`."""
        return replace(self, base=self.base.sized(axis_sizes)).transform()

    def with_specs(self, specs: PyTree, *, of_state: bool = False) -> ParameterTransform:
        """See `LayoutSpec.with_specs`."""
        # The layout of shards is part of the state: only specs that were given decide it.
        keeps = self.anchor.is_sharded and not of_state
        exchange = self.exchange if keeps else self.exchange.with_specs(specs)
        return replace(self, base=self.base.with_specs(specs), exchange=exchange).transform()

    def init(self, params: PyTree) -> OuterState:
        """The state of given parameters."""
        if self.anchor.is_sharded:  # others can be initialised outside of the axis
            require_bound(self.owner, self.exchange)
        return self.of_anchor(self.anchor.store(params), params)

    def of_anchor(self, anchor: PyTree, params: PyTree) -> OuterState:
        """The state of a stored anchor."""
        with layouts_known():  # a base has our specs
            base = self.base.init(params)
        return OuterState(
            count=jnp.zeros([], jnp.int32),
            anchor=anchor,
            outer=self.anchor.pin(self.optimizer.init(anchor), params),
            base=base,
        )

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
        """One update; see `ExchangeSpec.exchange`."""
        rate = None
        if self.rate is not None:
            rate = self.rate.now(state.count, extra)
            if self.rate.is_told and weight is not None:
                # Differentiated as if it counted: what the others took depends on it, too.
                away = NO_RATE + (rate - jax.lax.stop_gradient(rate))
                rate = jnp.where(weight > 0, rate, away)
            if self.rate.observe is not None:
                state = state._replace(outer=self.rate.observe(state.outer, rate))
        state = state._replace(count=increment(state.count))
        step = OuterStep(self, params, weight, phase, rate, extra)

        slow = is_due(SLOW, self.schedule, state.count, communicate, phase)
        # Exact: the slow step or the base's exchange. Not exact: the base's, then the slow step.
        if self.exact_average:
            communicate = decide(not slow if isinstance(slow, bool) else ~slow, communicate)
        # Two conditionals, not one in another: each costs the compiler the square of its arrays.
        operand = step.based((updates, others, state), communicate)
        return run_if(slow, step.slow, lambda o: o, operand)

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """See `ExchangeSpec.permit`: the base's."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    def carry(self, state: OuterState, params: PyTree, old: Placement, new: Placement) -> Carried:
        """See `CheckpointSpec.carry`."""
        move = functools.partial(self.anchor.moved, state.anchor, params, old, new)
        base = self.base.carry(state.base, params, old, new)
        count = carry_leaf(state.count, old, new)
        note = (
            "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
            "were averaged."
            if self.anchor.is_own
            else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
        )
        moved = OuterState(count, move(state.anchor), move(state.outer), base.state)
        return Carried(moved, (note, *base.notes))

    def like_on(self, state: OuterState, params: PyTree, at: Placement) -> OuterState:
        """See `CheckpointSpec.like_on`."""
        # Counters are the same anywhere; the anchor's form tells what is cut as it is.
        like = functools.partial(self.anchor.like_on, state.anchor, params, at)
        base = self.base.like_on(state.base, params, at)
        return OuterState(state.count, like(state.anchor), like(state.outer), base)


@dataclass(frozen=True)
class OuterStep:
    """One update of `Outer`.

    Attributes:
      of: the transform.
      params: before the update.
      weight: this replica's share in averages; None where all are alike.
      phase: of the update; None where the program decides.
      rate: the inner learning rate; None where the optimizer is not told.
      extra: what else `update` was given.
    """

    of: Outer
    params: PyTree
    weight: jax.Array | None
    phase: Phase | None
    rate: jax.Array | None
    extra: Mapping[str, Any]

    def based(
        self, operand: Operand, communicate: Communicate, phase: Phase | None = None
    ) -> Operand:
        """The base's update; `phase` is the base's where it is known and the step's is not."""
        updates, others, state = operand
        base = self.of.base.spec.exchange
        own = phase if self.phase is None else tuple(e for e in self.phase if e != SLOW)
        now = {"communicate": communicate, "weight": self.weight, "phase": own}
        # The base finds checked arguments, and need not warn of the same axes and layouts again.
        extra = dict(self.extra)
        if self.of.rate is not None and self.of.rate.is_told and not base.wants_learning_rate:
            extra.pop("learning_rate")  # a base of one's own need not know of it
        with inside(axis_names(self.of.exchange.axis_name)), layouts_known():
            updates, others, base_state = base.exchange(
                updates, others, state.base, self.params, **now, **extra
            )
        return updates, others, state._replace(base=base_state)

    def slow(self, operand: Operand) -> Operand:
        """The update in which the slow step is due."""
        if not self.of.exact_average:  # the base has had its update
            with phase_scope(SLOW):
                return self.outer(operand)
        with phase_scope(SLOW):
            base = self.of.base.spec.exchange
            if base.permit is None:
                return self.outer(operand)
            # A base such as only_finite has a say before anything is averaged.
            updates, others, state = operand
            axes = tuple(dict.fromkeys((*axis_names(self.of.exchange.axis_name), *base.axes)))
            y = apply_exactly(self.params, updates)
            allowed, state = self.of.permit(state, y, others, axes)
            return run_if(allowed, self.outer, lambda o: o, (updates, others, state))

    def outer(self, operand: Operand) -> Operand:
        """The slow step.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        updates, others, state = operand
        anchor, optimizer = self.of.anchor, self.of.optimizer
        # D, the pseudo-gradient: what the replicas have moved since the last slow step, downhill.
        displacement, residual, others, base_state = self.displacement(
            landing(self.params, updates), others, state
        )
        outer, told = self.told(state.outer)
        # Any optax optimizer, with D as its gradient; on shards, where the anchor is sharded.
        step, outer = optimizer.update(displacement, outer, state.anchor, **told)
        moved = jax.tree.map(added, state.anchor, step)
        # Replicas get their parameters from the anchor, never by adding to what they have: rounding
        # would let them drift apart a little with every slow step.
        target = anchor.restore(moved, self.params)
        if residual is not None:
            # What a replica has moved and the others did not hear of: part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), self.params, target)
        after = OuterState(state.count, moved, outer, base_state)
        return updates_to(self.params, target), others, after

    def told(self, outer: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The outer state, and what its optimizer is told."""
        if self.of.rate is None or self.rate is None:
            return outer, {}
        rate = self.rate
        # One rate for all, also where each keeps an anchor of its own: they would drift apart.
        if self.of.rate.agree is not None:
            axes = axis_names(self.of.exchange.axis_name)
            outer, rate = self.of.rate.agree(outer, rate, axes)
        return outer, {"learning_rate": rate}

    def displacement(
        self, y: PyTree, others: Others, state: OuterState
    ) -> tuple[PyTree, PyTree | None, Others, PyTree]:
        """D, in the anchor's form; what of its own this replica keeps; what travels; the base."""
        exchange, base = self.of.exchange, self.of.base.spec.exchange
        if not self.of.exact_average:
            own = jax.tree.map(subtracted, state.anchor, self.of.anchor.average(y))
            return own, None, others, state.base
        x, mass = self.mass(y, state.base)
        if exchange.codec is None:
            # sum x / sum w: the exact mean also of weighted or push-sum parameters.
            average, residual = self.of.anchor.average(x), None
            if mass is not None:
                average = self.per_mass(average, mass, state.anchor)
            displacement = jax.tree.map(subtracted, state.anchor, average)
        else:
            displacement, residual = coded_displacement(state.anchor, x, mass, exchange)
        if others:
            others = replica_mean(others, Exchange(exchange.axis_name), mass)
        return displacement, residual, others, base.reset(state.base)

    def mass(self, y: PyTree, base_state: PyTree) -> tuple[PyTree, jax.Array | None]:
        """The weighted parameters of this replica, and their weight; None where all weigh 1."""
        # Push-sum's (w z, w) from the base; else (z, 1), where the 1 need not be sent.
        x, mass = self.of.base.spec.exchange.numerator(base_state, y)
        if self.weight is None:
            return x, mass
        share = self.weight  # for the type checker, which forgets that it is one
        x = jax.tree.map(lambda leaf: scaled(leaf, share), x)
        return x, share if mass is None else scaled(mass, share)

    def per_mass(self, average: PyTree, mass: jax.Array, anchor: PyTree) -> PyTree:
        """sum x / sum w of the replicas, from mean x."""
        total = all_mean(mass, self.of.exchange.axis_name)
        if self.weight is None:
            return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
        # Where all replicas have run out, the anchor stays.
        return jax.tree.map(
            lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, anchor
        )
