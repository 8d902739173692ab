"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._support.types import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names
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
    phase_scope,
    replica_mean,
    require_bound,
    run_if,
)
from ...tree import added, apply_exactly, landing, subtracted, updates_to, widen_updates
from ._anchor import Anchor, ShardedAnchor


class OuterState(NamedTuple):
    """The state of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one


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


SLOW = "slow"
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
    def anchor(self) -> Anchor:
        """The anchor's storage: whole on each replica, or sharded over the replicas."""
        if self.exact_average and self.shard_state:
            return ShardedAnchor(self.exchange)
        return Anchor(self.exchange if self.exact_average else None)

    def transform(self) -> ParameterTransform:
        """Return this outer optimizer as a `ParameterTransform`."""
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
            events=(SLOW,) if base is ALONE else None,  # a base checks its part of the phase itself
            permit=None if base.permit is None else self.permit,
            anchor=lambda state, params: self.anchor.restore(state.anchor, params),
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

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the events of update `t`; see `ScheduleSpec.phase`."""
        slow = bool(self.schedule(t))
        # An exact average replaces the base's exchange of that update, which is left out.
        if slow and self.exact_average:
            base_events = ()
        else:
            # Gossip does not rotate in updates in which it does not exchange.
            steps = self.schedule.times(t - 1) if self.exact_average else 0
            base_events = self.base.spec.schedule.phase(t, skipped + steps)
        return (*base_events, SLOW) if slow else base_events

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything; see `ScheduleSpec.due`."""
        slow = self.schedule(t)
        return either(self.base.spec.schedule.due(t), slow)

    def skipped(self, state: OuterState) -> Any:
        """Return the skips of the base other than slow steps; see `ScheduleSpec.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.exact_average else 0
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
        return self.of_anchor(self.anchor.store(params), params)

    def of_anchor(self, anchor: PyTree, params: PyTree) -> OuterState:
        """Return the first state for a stored anchor."""
        with layouts_known():  # the base has the same specs, so it need not warn about layouts
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
        """Make one update; see `ExchangeSpec.exchange`."""
        rate, base = None, self.base.spec.exchange
        if self.rate is not None:
            rate = self.rate.now(state.count, extra)
            if self.rate.is_passed and weight is not None:
                # The gradient of an idle replica's rate is kept: the rate in use depends on it too.
                away = NO_RATE + (rate - jax.lax.stop_gradient(rate))
                rate = jnp.where(weight > 0, rate, away)
            state = state._replace(outer=self.rate.observe(state.outer, rate))
            if self.rate.is_passed and not base.wants_learning_rate:
                extra.pop("learning_rate")  # a user's base need not accept it
        state = state._replace(count=increment(state.count))
        base_phase = None if phase is None else tuple(e for e in phase if e != SLOW)

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

        outer_step = functools.partial(self.outer_step, params, weight, rate)
        slow_step = functools.partial(self.slow, params, outer_step)

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

    def slow(
        self, params: PyTree, outer_step: Callable[[Operand], Operand], operand: Operand
    ) -> Operand:
        """Make the slow step after the base's update, unless the base refuses it."""
        with phase_scope(SLOW):
            base = self.base.spec.exchange
            if not self.exact_average or base.permit is None:
                return outer_step(operand)
            # A base such as only_finite may refuse the step before anything is averaged.
            updates, others, state = operand
            axes = tuple(dict.fromkeys((*axis_names(self.exchange.axis_name), *base.axes)))
            y = apply_exactly(params, updates)
            allowed, state = self.permit(state, y, others, axes)
            return run_if(allowed, outer_step, lambda o: o, (updates, others, state))

    def outer_step(
        self,
        params: PyTree,
        weight: jax.Array | None,
        rate: jax.Array | None,
        operand: Operand,
    ) -> Operand:
        """Make the slow step.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        updates, others, state = operand
        # D, the pseudo-gradient: the displacement since the last slow step, with sign reversed.
        displacement, residual, others, base_state = self.displacement(
            landing(params, updates), weight, others, state
        )
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
        target = self.anchor.restore(anchor, params)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), params, target)
        after = OuterState(state.count, anchor, outer, base_state)
        return updates_to(params, target), others, after

    def displacement(
        self, y: PyTree, weight: jax.Array | None, others: Others, state: OuterState
    ) -> tuple[PyTree, PyTree | None, Others, PyTree]:
        """Return D in the anchor's form, a codec's residual, `others`, and the base's state."""
        exchange, base, residual = self.exchange, self.base.spec.exchange, None
        if not self.exact_average:
            displacement = jax.tree.map(subtracted, state.anchor, self.anchor.average(y))
            return displacement, None, others, state.base
        # A push-sum base returns (w z, w), others (z, None), where None stands for 1.
        x, mass = base.numerator(state.base, y)
        if weight is not None:
            x = jax.tree.map(lambda leaf: scaled(leaf, weight), x)
            mass = weight if mass is None else scaled(mass, weight)
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
        return displacement, residual, others, base.reset(state.base)

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
        move = functools.partial(self.anchor.carried, state.anchor, params, old, new)
        base = self.base.carry(state.base, params, old, new)
        count = carry_leaf(state.count, old, new)
        note = (
            "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
            "were averaged."
            if self.anchor.exchange is None
            else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
        )
        carried = OuterState(count, move(state.anchor), move(state.outer), base.state)
        return Carried(carried, (note, *base.notes))

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """Return the types of the state on placement `at`; see `CheckpointSpec.like_on`."""
        # Counters have one type on every mesh; trees of the anchor's form are split as it is.
        like = functools.partial(self.anchor.like_on, state.anchor, params, at)
        base = self.base.like_on(state.base, params, at)
        return OuterState(state.count, like(state.anchor), like(state.outer), base)
