"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from ..._support.types import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names
from ...transform import (
    BesideSpec,
    Carried,
    Communicate,
    Every,
    Exchange,
    Others,
    ParameterTransform,
    StatePlacement,
    decide,
    either,
    increment,
    inside,
    is_due,
    layouts_known,
    mean_and_residual,
    over_stages,
    parameter_transform,
    phase_scope,
    replica_mean,
    require_bound,
    run_if,
)
from ...tree import added, apply_exactly, landing, subtracted, updates_to
from ._anchor import Anchor, ShardedAnchor
from ._fragments import ALL_LEAVES, Fragment, exchange_of
from ._moved import carried, like_on
from ._placement import Placement
from ._state import ALONE, NO_RATE, SLOW, Now, Operand, OuterRate, OuterState


@dataclass(frozen=True)
class Outer:
    """The parameter transform of an outer optimizer, with arguments that its caller has checked.

    Attributes:
      owner: public name of the transform, for messages.
      exchange: the axes of slow steps, and the pieces in which they exchange.
      schedule: the updates in which slow steps are due.
      optimizer: the outer optimizer.
      placement: whether each replica keeps only 1/R of the anchor.
      base: the transform that runs between slow steps.
      exact_average: whether a slow step takes the replicas' mean and skips the base's exchange;
        else each replica continues with its parameters after that exchange.
      specs: layout of the parameters that was given later than the exchange's; shards do not follow
        it, since how they are cut is part of the state.
      is_sharded: what was decided for the parameters in use; None before.
      rate: source of the inner learning rate; None if the optimizer does not use it.
    """

    owner: str
    exchange: Exchange
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    placement: Placement
    base: ParameterTransform = ALONE
    exact_average: bool = True
    specs: PyTree | None = None
    is_sharded: bool | None = None
    rate: OuterRate | None = None

    @functools.cached_property
    def anchor(self) -> Anchor:
        """The anchor's storage: whole on each replica, or sharded over the replicas."""
        assert self.is_sharded is not None, "`on` decides it from the parameters"
        if self.is_sharded:
            return ShardedAnchor(self.exchange)
        return Anchor(self.exchange if self.exact_average else None)

    def on(self, params: PyTree) -> Self:
        """Return this outer optimizer for these parameters, of which only the types matter.

        Raises:
          ValueError: sharded state was asked for, and the optimizer is not element-wise.
        """
        if self.is_sharded is not None:
            return self
        is_sharded = self.placement.is_sharded(params)
        exchange = self.exchange if is_sharded else self.exchange.with_specs(self.specs)
        return replace(self, exchange=exchange, is_sharded=is_sharded)

    @property
    def replaces_base(self) -> bool:
        """Return whether a slow step leaves out the base's exchange of that update."""
        return self.exact_average

    @property
    def events(self) -> tuple[str, ...] | None:
        """Return the names of its events in phases; None where they are not known yet."""
        return (SLOW,)

    def transform(self) -> ParameterTransform:
        """Return this outer optimizer as a `ParameterTransform`."""
        base, cuts = self.base, self.placement.shard_state is not False
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
            events=self.events if base is ALONE else None,  # a base checks its own events itself
            permit=None if base.permit is None else self.permit,
            anchor=self.whole_anchor,
            sized=self.sized,
            with_specs=self.with_specs,
            shards_whole_leaves=cuts and self.exchange.param_specs is None,
            shard_specs=self.exchange.param_specs if cuts else None,
            wants_learning_rate=self.rate is not None and self.rate.is_passed,
            beside=self.beside,
            shards=self.shards,
            carry=self.carry,
            like_on=self.like_on,
            shares=lambda state: base.shares(state.base),
            stored=self.placement.text,
        )

    @property
    def beside(self) -> BesideSpec | None:
        """Return what a host may exchange beside several updates; see `ExchangeSpec.beside`."""
        return None

    def own_phase(self, t: int) -> Phase:
        """Return the events of update `t` besides the base's."""
        return (SLOW,) if self.schedule(t) else ()

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the events of update `t`; see `ScheduleSpec.phase`."""
        slow = self.own_phase(t)
        # An exact average replaces the base's exchange of that update, which is left out.
        if slow and self.replaces_base:
            base_events = ()
        else:
            # Gossip does not rotate in updates in which it does not exchange.
            steps = self.schedule.times(t - 1) if self.replaces_base else 0
            base_events = self.base.spec.schedule.phase(t, skipped + steps)
        return (*base_events, *slow)

    def own_due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything besides what the base does."""
        return self.schedule(t)

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything; see `ScheduleSpec.due`."""
        return either(self.base.spec.schedule.due(t), self.own_due(t))

    def skipped(self, state: OuterState) -> Any:
        """Return the skips of the base other than slow steps; see `ScheduleSpec.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.replaces_base else 0
        return self.base.skipped(state.base) - slow

    def shards(self, state: OuterState) -> list[Any]:
        """Return the arrays that are sharded over replicas; see `CheckpointSpec.shards`."""
        shards = jax.tree.leaves(state.anchor) if self.placement.last() else []
        return [*shards, *self.base.shards(state.base)]

    def sized(self, axis_sizes: Mapping[str, int]) -> ParameterTransform:
        """Return the transform for axes of these sizes; see `LayoutSpec.sized`."""
        return replace(self, base=self.base.sized(axis_sizes)).transform()

    def with_specs(self, specs: PyTree, *, of_state: bool = False) -> ParameterTransform:
        """Return the transform with `param_specs`; see `LayoutSpec.with_specs`."""
        # The layout of shards is part of the state, so only the argument `param_specs` decides it.
        keeps = self.placement.shard_state is not False and not of_state
        exchange = self.exchange if keeps else self.exchange.with_specs(specs)
        base = self.base.with_specs(specs)
        return replace(self, base=base, exchange=exchange, specs=specs).transform()

    def init(self, params: PyTree) -> OuterState:
        """Return the first state for `params`."""
        outer = self.on(params)
        if outer.is_sharded:  # a whole anchor can be initialised outside of the axis
            require_bound(self.owner, self.exchange)
        return outer._checked(params, lambda anchor, params: anchor.store(params))

    def like_init(self, params: PyTree) -> OuterState:
        """Return a state like that of `init`, of which only shapes and dtypes matter."""
        return self.on(params)._checked(params, lambda anchor, params: anchor.like_stored(params))

    def _checked(self, params: PyTree, store: Callable[[Anchor, PyTree], Any]) -> OuterState:
        """Return the first state; refuse an optimizer that treats its shards in a way of theirs."""
        state = self.first_state(params, store)
        if self.is_sharded:
            self.placement.check_shards(params, jax.tree.leaves(state.anchor))
        return state

    def first_state(self, params: PyTree, store: Callable[[Anchor, PyTree], Any]) -> OuterState:
        """Return the first state, with an anchor that `store` makes."""
        with layouts_known():  # the base has the same specs, so it need not warn about layouts
            base = self.base.init(params)
        anchor = store(self.anchor, params)
        outer = self.anchor.pin(self.stepper.init(anchor), params)
        return OuterState(jnp.zeros([], jnp.int32), anchor, outer, base)

    @property
    def stepper(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer of the anchor: on stages of a pipeline it sees the model's own leaves."""
        is_own = self.is_sharded or self.placement.optimizer is None
        return self.optimizer if is_own else over_stages(self.optimizer, "outer_optimizer")

    def whole_anchor(self, state: OuterState, params: PyTree) -> PyTree:
        """Return the anchor as a tree like `params`; see `LayoutSpec.anchor`."""
        return self.on(params).anchor.restore(state.anchor, params)

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
        own_events = self.events or ()
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

        now = Now(weight, rate, communicate, phase)
        return self.on(params).around(based, params, now, base_phase, (updates, others, state))

    def around(
        self,
        based: Callable[..., Operand],
        params: PyTree,
        now: Now,
        base_phase: Phase | None,
        operand: Operand,
    ) -> Operand:
        """Make the base's exchange or the slow step, of which the slow step comes first."""
        state = self.observed(operand[2], now.rate)
        operand = (*operand[:2], state)
        slow_step = functools.partial(self.slow, params, now)

        def exchanged(operand: Operand) -> Operand:
            slow = is_due(SLOW, self.schedule, state.count, now.communicate, now.phase)
            if not self.exact_average:  # the base's exchange, then the slow step
                return run_if(slow, slow_step, lambda o: o, based(operand, now.communicate))
            # One of the two is due, so a base with one kind of exchange need not read its counter.
            of_base: Any = now.communicate, base_phase
            if now.phase is None and self.base.skipped is None:
                kinds = [kind for kind in self.base.phases() if kind]
                of_base = (True, kinds[0]) if len(kinds) == 1 else of_base
            # In a slow step the base only counts the update: its exchange would be wasted.
            return run_if(
                slow, lambda o: slow_step(based(o, False)), lambda o: based(o, *of_base), operand
            )

        # One conditional wraps both, so that a local step passes its updates through only one. It
        # also shows in the program text that a slow step leaves out the base's exchange.
        due = self.due(state.count) if now.phase is None else bool(now.phase)
        due = decide(due, now.communicate)
        return run_if(due, exchanged, lambda o: based(o, False), operand)

    def observed(self, state: OuterState, rate: jax.Array | None) -> OuterState:
        """Return the state after any update at this rate."""
        if self.rate is None or self.rate.observe is None or rate is None:
            return state
        return state._replace(outer=self.rate.observe(state.outer, rate))

    def slow(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Make the slow step after the base's update, unless the base refuses it."""
        outer_step = functools.partial(self.outer_step, params, now)
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

    def outer_step(self, params: PyTree, now: Now, operand: Operand) -> Operand:
        """Make the slow step.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        updates, others, state = operand
        base, y, residual = self.base.spec.exchange, landing(params, updates), None
        # D, the pseudo-gradient: the displacement since the last slow step, with sign reversed.
        if self.exact_average:
            x, mass = self.numerator(y, now.weight, state.base)
            displacement, residual = self.displacement(
                x, mass, state.anchor, may_be_idle=now.weight is not None
            )
            if others:
                others = replica_mean(others, Exchange(self.exchange.axis_name), mass)
            state = state._replace(base=base.reset(state.base))
        else:
            displacement = jax.tree.map(subtracted, state.anchor, self.anchor.average(y))
        whole, state = self.stepped(params, displacement, now.rate, state)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            whole = jax.tree.map(subtracted, whole, residual)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), params, whole)
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
        self, x: PyTree, mass: jax.Array | None, anchor: PyTree, *, may_be_idle: bool
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
        self, params: PyTree, displacement: PyTree, rate: jax.Array | None, state: OuterState
    ) -> tuple[PyTree, OuterState]:
        """Return the anchor, whole, and the state after the outer optimizer's step."""
        outer, options = state.outer, {}
        if self.rate is not None and rate is not None:
            # With different rates the replicas would diverge, even if each keeps its own anchor.
            if self.rate.agree is not None:
                outer, rate = self.rate.agree(outer, rate, axis_names(self.exchange.axis_name))
            options = {"learning_rate": rate}
        # Any optax optimizer, with D as its gradient; it runs on shards of a sharded anchor.
        step, outer = self.stepper.update(displacement, outer, state.anchor, **options)
        anchor = jax.tree.map(added, state.anchor, step)
        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        whole = self.anchor.restore(anchor, params)
        return whole, state._replace(anchor=anchor, outer=outer)

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """Return the base's permission; see `ExchangeSpec.permit`."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    @property
    def has_flight(self) -> bool:
        """Return whether states hold what is in flight."""
        return False

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters: all leaves are one."""
        del params
        return (ALL_LEAVES,)

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor:
        """Return the storage of a fragment's anchor."""
        return replace(self, exchange=exchange_of(fragment, self.exchange, params)).anchor

    def carry(
        self, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """Return the state on another placement; see `CheckpointSpec.carry`."""
        return carried(self.on(params), state, params, old, new)

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """Return the types of the state on placement `at`; see `CheckpointSpec.like_on`."""
        return like_on(self.on(params), state, params, at)
