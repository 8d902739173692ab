"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers. A model is a list of
fragments, whose slow steps are due one after another; as a rule of one fragment, the whole model.

With a `delay`, taking what a slow step sends and sending it are events of earlier updates; see
`_delay.py`. Source of fragments, `delay` and `merge`: Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, section 3.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._support.checks import checked_int
from ..._support.types import Phase, PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names, match_varying
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
    run_one_of,
)
from ...tree import Staged, added, apply_exactly, landing, parts_of, subtracted, updates_to
from ._anchor import Anchor, ShardedAnchor
from ._delay import (
    NOTHING,
    InFlight,
    arrived,
    average_all,
    average_part,
    dropped,
    nothing_in_flight,
)
from ._fragments import (
    SEND,
    SLOW,
    TAKE,
    Fragment,
    Fragments,
    Turn,
    check_turns,
    divided,
    exchange_of,
    joined,
    keys_in,
    keys_of,
    turns_of,
    views,
)
from ._moved import carried, like_on
from ._placement import Placement
from ._state import ALONE, NO_RATE, OuterRate, OuterState


class Now(NamedTuple):
    """The arguments of one update; see `ParameterTransform`."""

    params: PyTree
    weight: jax.Array | None
    rate: jax.Array | None  # the inner learning rate; None if the outer optimizer does not use it
    communicate: Communicate
    phase: Phase | None


Operand = tuple[PyTree, Others, OuterState]  # updates, arrays averaged with them, state


@dataclass(frozen=True)
class Outer:
    """The parameter transform of an outer optimizer.

    Attributes:
      owner: public name of the transform, for messages.
      exchange: the axes of slow steps, and the pieces in which they exchange.
      schedule: the updates in which slow steps are due; of several fragments, those of the last.
      optimizer: the outer optimizer.
      placement: whether each replica keeps only 1/R of the anchor.
      base: the transform that runs between slow steps.
      exact_average: whether a slow step takes the replicas' mean; else each replica continues with
        its parameters after the base's exchange.
      rate: source of the inner learning rate; None if the optimizer does not use it.
      fragments: the number of fragments, or the function that says to which a leaf belongs.
      delay: number of updates between taking what is sent and applying its mean.
      merge: the share of a replica's own progress that a slow step keeps, in [0, 1].
      specs: layout of the parameters that was given later than the exchange's; shards do not follow
        it, since how they are cut is part of the state.
      is_sharded: what was decided for the parameters in use; None before.
      counted: the number of fragments that a function makes, once a state was made.
    """

    owner: str
    exchange: Exchange
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    placement: Placement
    base: ParameterTransform = ALONE
    exact_average: bool = True
    rate: OuterRate | None = None
    fragments: Fragments = 1
    delay: int = 0
    merge: float = 0.0
    specs: PyTree | None = None
    is_sharded: bool | None = None
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def is_spread(self) -> bool:
        """Whether slow steps do less than to set all parameters to the anchor at once."""
        return self.fragments != 1 or self.delay != 0 or self.merge != 0

    @property
    def replaces_base(self) -> bool:
        """Whether a slow step leaves out the base's exchange of that update.

        Where it does not, the base exchanges all leaves as if there were no slow step, and first.
        """
        return self.exact_average and not self.is_spread

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

    def transform(self) -> ParameterTransform:
        """Return this outer optimizer as a `ParameterTransform`.

        Raises:
          ValueError: fragments, delay or merge out of range, or not fit for the schedule, the codec
            or slow steps without an exact average.
        """
        self._check()
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

    def _check(self) -> None:
        """Raise `ValueError` unless fragments, delay and merge fit the other arguments."""
        owner, codec, merge = self.owner, self.exchange.codec, self.merge
        checked_int(f"{owner}: `delay` counts updates and", self.delay, 0)
        if not callable(self.fragments):
            checked_int(f"{owner}: `fragments`", self.fragments, 1)
            check_turns(owner, self.schedule, self.fragments, self.delay)
        if self.delay and self.schedule.before == "all":
            raise ValueError(
                f'{owner}: `delay` must be 0 for a schedule with before="all", in which updates '
                f"without a distance are due, got {self.delay}."
            )
        is_number = isinstance(merge, int | float | np.number) and not isinstance(merge, bool)
        if not is_number or not 0 <= merge <= 1:
            raise ValueError(f"{owner}: `merge` must be a number in [0, 1], got {merge!r}.")
        if self.is_spread and not self.exact_average:
            raise ValueError(
                f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is "
                f"nothing to spread or to keep; got fragments={self.fragments!r}, "
                f"delay={self.delay!r}, merge={merge!r}."
            )
        if self.delay and codec is not None:
            raise ValueError(
                f"{owner}: with a `delay` what is in flight is partly a mean, which a `codec` "
                f"can't encode again; got delay={self.delay} and {codec!r}."
            )
        if merge and codec is not None and codec.error_feedback:
            raise ValueError(
                f"{owner}: `merge` keeps the progress of a replica, and so does error feedback: "
                f"its rounding error would be kept twice; got merge={merge!r}, {codec!r}."
            )

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

    # The fragments, and when something is due.

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters, of which only shapes and dtypes matter.

        Raises:
          ValueError: the number of fragments does not fit parameters, period and delay.
        """
        fragments = divided(self.owner, self.fragments, params)
        check_turns(self.owner, self.schedule, len(fragments), self.delay)
        self.counted["fragments"] = len(fragments)
        return fragments

    def turns(self) -> tuple[Turn, ...]:
        """Return the turn of each fragment.

        Raises:
          ValueError: the number of fragments is that of a function, and no state was made yet.
        """
        count = self.counted.get("fragments") if callable(self.fragments) else self.fragments
        if count is None:
            raise ValueError(
                f"{self.owner}: `fragments` is a function, so their number is known once a state "
                "was made: call `init` before phases are asked for."
            )
        return turns_of(self.schedule, count, self.delay)

    @property
    def events(self) -> tuple[str, ...] | None:
        """Return the names of its events in phases; None where they are not known yet."""
        if callable(self.fragments) and "fragments" not in self.counted:
            return None
        names = (TAKE, SEND, SLOW) if self.delay else (SLOW,)
        return tuple(turn.event(name) for turn in self.turns() for name in names)

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the events of update `t`; see `ScheduleSpec.phase`."""
        own = tuple(event for turn in self.turns() for event in turn.phase(t))
        # An exact average replaces the base's exchange of that update, which is left out.
        if own and self.replaces_base:
            return own
        # Gossip does not rotate in updates in which it does not exchange.
        steps = self.schedule.times(t - 1) if self.replaces_base else 0
        return (*self.base.spec.schedule.phase(t, skipped + steps), *own)

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything; see `ScheduleSpec.due`."""
        own = functools.reduce(either, (turn.due(t) for turn in self.turns()))
        return either(self.base.spec.schedule.due(t), own)

    def skipped(self, state: OuterState) -> Any:
        """Return the skips of the base other than slow steps; see `ScheduleSpec.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.replaces_base else 0
        return self.base.skipped(state.base) - slow

    # The state.

    def init(self, params: PyTree) -> OuterState:
        """Return the first state for `params`."""
        outer = self.on(params)
        if outer.is_sharded:  # a whole anchor can be initialised outside of the axis
            require_bound(self.owner, self.exchange)
        return outer.first_state(params, lambda anchor, x: anchor.store(x))

    def like_init(self, params: PyTree) -> OuterState:
        """Return a state like that of `init`, of which only shapes and dtypes matter."""
        return self.on(params).first_state(
            params, lambda anchor, leaves: anchor.like_stored(leaves)
        )

    def first_state(self, params: PyTree, store: Callable[[Anchor, PyTree], Any]) -> OuterState:
        """Return the first state, with anchors that `store` makes.

        Raises:
          ValueError: an optimizer that treats parts of the model's buffers in a way of their own.
        """
        fragments = self.divided(params)
        in_stages = len(fragments) > 1 and parts_of(params, Staged)
        if in_stages and (why := self.placement.why_whole(params)):
            raise ValueError(
                f"{self.owner}: `fragments` of a model in stages are parts of its flat buffers, so "
                f"`outer_optimizer` must be element-wise, and {why}. Use fragments=1 with this one."
            )
        with layouts_known():  # the base has the same specs, so it need not warn about layouts
            base = self.base.init(params)
        parts = []
        for fragment in fragments:
            leaves, storage = fragment.of(params), self.anchor_of(fragment, params)
            anchor = store(storage, leaves)
            outer = storage.pin(self.stepper(fragment).init(anchor), leaves)
            flight = nothing_in_flight(leaves) if self.delay else ()
            parts.append(OuterState(jnp.zeros([], jnp.int32), anchor, outer, base, flight))
        state = joined(parts[0], parts, keys_of(fragments))
        if self.is_sharded:
            self.placement.check_shards(params, jax.tree.leaves(state.anchor))
        return state

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor:
        """Return the storage of a fragment's anchor: whole, or sharded over the replicas."""
        assert self.is_sharded is not None, "`on` decides it from the parameters"
        exchange = exchange_of(fragment, self.exchange, params)
        if self.is_sharded:
            return ShardedAnchor(exchange)
        return Anchor(exchange if self.exact_average else None)

    def stepper(self, fragment: Fragment) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer of a fragment's anchor.

        On stages of a pipeline it sees the model's own leaves, or parts of buffers as they are.
        """
        is_flat = self.is_sharded or fragment.places is not None
        if is_flat or self.placement.optimizer is None:
            return self.optimizer
        return over_stages(self.optimizer, "outer_optimizer")

    def whole_anchor(self, state: OuterState, params: PyTree) -> PyTree:
        """Return the anchor of all fragments as a tree like `params`; see `LayoutSpec.anchor`."""
        whole, outer, fragments = params, self.on(params), self.divided(params)
        for fragment, part in zip(fragments, views(state, keys_of(fragments)), strict=True):
            storage = outer.anchor_of(fragment, params)
            whole = fragment.put(whole, storage.restore(part.anchor, fragment.of(params)))
        return whole

    def shards(self, state: OuterState) -> list[Any]:
        """Return the arrays that are sharded over replicas; see `CheckpointSpec.shards`."""
        shards = jax.tree.leaves(state.anchor) if self.placement.last() else []
        return [*shards, *self.base.shards(state.base)]

    def carry(
        self, state: OuterState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """Return the state on another placement; see `CheckpointSpec.carry`."""
        return carried(self.on(params), state, params, old, new)

    def like_on(self, state: OuterState, params: PyTree, at: StatePlacement) -> OuterState:
        """Return the types of the state on placement `at`; see `CheckpointSpec.like_on`."""
        return like_on(self.on(params), state, params, at)

    # One update: the base's exchange, and what is due of the fragments.

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
        fragments = self.divided(params)  # counts them, also in a run that goes on
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

        outer, now = self.on(params), Now(params, weight, rate, communicate, phase)
        around = outer.instead_of_base if self.replaces_base else outer.after_base
        return around(fragments, based, now, (updates, others, state))

    def instead_of_base(
        self,
        fragments: Sequence[Fragment],
        based: Callable[..., Operand],
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Make the slow step, or else the base's exchange."""
        updates, others, state = operand
        state = self.observed(state, now.rate)

        def exchanged(operand: Operand) -> Operand:
            slow = is_due(SLOW, self.schedule, state.count, now.communicate, now.phase)
            # One of the two is due, so a base with one kind of exchange need not read its counter.
            of_base: Any = (now.communicate,)
            if now.phase is None and self.base.skipped is None:
                kinds = [kind for kind in self.base.phases() if kind]
                of_base = (True, kinds[0]) if len(kinds) == 1 else of_base
            slow_step = functools.partial(self.run, fragments, 0, (SLOW,), now)
            # In a slow step the base only counts the update: its exchange would be wasted.
            return run_if(
                slow, lambda o: slow_step(based(o, False)), lambda o: based(o, *of_base), operand
            )

        # One conditional wraps both, so that a local step passes its updates through only one. It
        # also shows in the program text that a slow step leaves out the base's exchange.
        due = self.due(state.count) if now.phase is None else bool(now.phase)
        due = decide(due, now.communicate)
        return run_if(due, exchanged, lambda o: based(o, False), (updates, others, state))

    def after_base(
        self,
        fragments: Sequence[Fragment],
        based: Callable[..., Operand],
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Make the base's exchange, and then what is due of the fragments.

        At most one fragment has events in an update. The program holds one switch over all that
        may be due, or with a phase what it names.
        """
        updates, others, state = based(operand, now.communicate)
        keys = keys_of(fragments)
        parts = [self.observed(part, now.rate) for part in views(state, keys)]
        # With a conditional around it the exchange would run beside nothing.
        sends_always = self._sends_always and now.phase is None and now.communicate is True
        if sends_always:
            parts = [self.sent(fragments[0], now.params, parts[0])]
        index: int | jax.Array = 0
        branches: list[Callable[[Operand], Operand]] = [lambda operand: operand]
        for number, turn in enumerate(self.turns()):
            for events in turn.options(now.phase):
                due = now.phase is not None or turn.is_now(events, state.count)
                index = len(branches) if due is True else jnp.where(due, len(branches), index)
                rest = tuple(event for event in events if event != SEND or not sends_always)
                branches.append(functools.partial(self.run, fragments, number, rest, now))

        def missed(operand: Operand) -> Operand:
            # Of a displacement of which a part was not sent there is no mean.
            updates, others, state = operand
            parts = views(state, keys)
            for number, turn in enumerate(self.turns() if self.delay else ()):
                due = turn.due(state.count) if now.phase is None else bool(turn.options(now.phase))
                flight = dropped(parts[number].in_flight, due)
                parts[number] = parts[number]._replace(in_flight=flight)
            return updates, others, joined(state, parts, keys)

        operand = updates, others, joined(state, parts, keys)
        return run_if(
            now.communicate, functools.partial(run_one_of, index, branches), missed, operand
        )

    @property
    def _sends_always(self) -> bool:
        """Whether any update may send: each but one does, which overwrites what it sent."""
        return 0 < self.delay == self.schedule.k - 1 and len(self.turns()) == 1

    def observed(self, state: OuterState, rate: jax.Array | None) -> OuterState:
        """Return the state of one fragment after any update at this rate."""
        if self.rate is None or self.rate.observe is None or rate is None:
            return state
        return state._replace(outer=self.rate.observe(state.outer, rate))

    # The events of one fragment. Updates, others and parameters are those of all leaves; anchor,
    # outer state and what is in flight are those of the fragment.

    def run(
        self,
        fragments: Sequence[Fragment],
        number: int,
        events: Sequence[str],
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Return the operand, with the state of all fragments, after events of one."""
        updates, others, state = operand
        turn, keys = self.turns()[number], keys_of(fragments)
        parts = views(state, keys)
        steps = {TAKE: self.take, SEND: self.send, SLOW: self.land if self.delay else self.slow}
        operand = updates, others, parts[number]
        for event in events:
            with phase_scope(turn.event(event)):
                operand = steps[event](fragments[number], now, operand)
        updates, others, parts[number] = operand
        return updates, others, joined(state._replace(base=parts[number].base), parts, keys)

    def slow(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Make the slow step with an exchange in this update, unless the base refuses it.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """

        def step(operand: Operand) -> Operand:
            updates, _, state = operand
            y, mass, residual = landing(now.params, updates), None, None
            # D, the pseudo-gradient: the displacement since the last slow step, sign reversed.
            if self.exact_average:
                x, mass = self.numerator(y, now.weight, state.base)
                displacement, residual = self.displacement(fragment, x, mass, now, state)
            else:
                displacement = jax.tree.map(subtracted, state.anchor, y)
            return self.moved(fragment, displacement, residual, mass, now, operand)

        allowed, operand = self.permitted(now.params, operand)
        return run_if(allowed, step, lambda operand: operand, operand)

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
        self,
        fragment: Fragment,
        x: PyTree,
        mass: jax.Array | None,
        now: Now,
        state: OuterState,
    ) -> tuple[PyTree, PyTree | None]:
        """Return D in the anchor's form and a codec's residual, from weighted parameters."""
        x, anchor, params = fragment.of(x), state.anchor, now.params
        if self.exchange.codec is None:
            # sum x / sum w is the exact mean of weighted and push-sum parameters too.
            average = self.anchor_of(fragment, params).average(x)
            if mass is not None:
                average = self.per_mass(average, mass, None if now.weight is None else anchor)
            return jax.tree.map(subtracted, anchor, average), None
        # Send D and not x: D is small, and a codec's rounding error is proportional to it.
        z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
        local, exchange = jax.tree.map(subtracted, anchor, z), self.exchange
        return mean_and_residual(local, exchange_of(fragment, exchange, params), mass, role="slow")

    def per_mass(self, average: PyTree, mass: jax.Array, idle: PyTree | None) -> PyTree:
        """Return sum x / sum w of the replicas from mean x; `idle` if all have run out of data."""
        total = all_mean(mass, self.exchange.axis_name)
        if idle is None:
            return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
        return jax.tree.map(
            lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, idle
        )

    def moved(
        self,
        fragment: Fragment,
        displacement: PyTree,
        residual: PyTree | None,
        mass: jax.Array | None,
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Return updates and state after the outer optimizer's step with this displacement."""
        updates, others, state = operand
        if others and self.exact_average:
            others = replica_mean(others, Exchange(self.exchange.axis_name), mass)
        outer, rate, options = state.outer, now.rate, {}
        if self.rate is not None and rate is not None:
            # With different rates the replicas would diverge, even if each keeps its own anchor.
            if self.rate.agree is not None:
                outer, rate = self.rate.agree(outer, rate, axis_names(self.exchange.axis_name))
            options = {"learning_rate": rate}
        # Any optax optimizer, with D as its gradient; it runs on shards of a sharded anchor.
        step, outer = self.stepper(fragment).update(displacement, outer, state.anchor, **options)
        anchor = jax.tree.map(added, state.anchor, step)
        state = state._replace(anchor=anchor, outer=outer)
        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        leaves = fragment.of(now.params)
        whole = self.anchor_of(fragment, now.params).restore(anchor, leaves)
        target = merged(landing(leaves, fragment.of(updates)), whole, self.merge)
        if residual is not None:
            # The part of its displacement that a replica has not sent is part of its next D.
            target = jax.tree.map(subtracted, target, residual)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), leaves, target)
        updates = fragment.put(updates, updates_to(leaves, target))

        def move(tree: PyTree) -> PyTree:
            local = fragment.of(tree)
            new = merged(local, whole, self.merge)
            return fragment.put(tree, jax.tree.map(lambda n, x: n.astype(x.dtype), new, local))

        base = self.base.spec.exchange
        if self.replaces_base:
            state = state._replace(base=base.reset(state.base))
        elif self.exact_average:
            # What the base still has under way moves alike.
            state = state._replace(base=base.settle(state.base, move))
        return updates, others, state

    def take(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Take what this fragment sends, unless the base refuses it."""
        allowed, operand = self.permitted(now.params, operand)
        updates, others, state = operand
        x, mass = self.numerator(landing(now.params, updates), now.weight, state.base)
        # Weighted values and their weight, whose sums over replicas give the exact mean. The rate
        # goes with them: the displacement was made at it, however late it is applied.
        old: InFlight = state.in_flight
        one = jnp.ones_like(old.mass)
        taken = InFlight(
            values=jax.tree.map(
                lambda new, like: new.astype(like.dtype), fragment.of(x), old.values
            ),
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if now.rate is None else now.rate.astype(one.dtype),
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return updates, others, state._replace(in_flight=match_varying(taken, old))

    def send(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Average the next part of what is in flight."""
        updates, others, state = operand
        return updates, others, self.sent(fragment, now.params, state)

    def sent(self, fragment: Fragment, params: PyTree, state: OuterState) -> OuterState:
        """Return the state with the next part of what is in flight averaged."""
        exchange = exchange_of(fragment, self.exchange, params)
        flight = average_part(state.in_flight, exchange, self.delay)
        return state._replace(in_flight=match_varying(flight, state.in_flight))

    def land(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Make the slow step with what has arrived, if all of it has."""
        state = operand[2]
        flight: InFlight = state.in_flight
        average, has_weight = arrived(flight, self.exchange)
        displacement = jax.tree.map(
            lambda old, new: jnp.where(has_weight, subtracted(old, new), 0),
            state.anchor,
            self.anchor_of(fragment, now.params).store(average),
        )
        _, mass = self.numerator(landing(now.params, operand[0]), now.weight, state.base)
        now = now._replace(rate=None if self.rate is None else flight.rate)
        after = self.moved(fragment, displacement, None, mass, now, operand)
        is_whole = flight.parts == self.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        updates, others, state = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old), after, operand
        )
        return updates, others, state._replace(in_flight=dropped(flight, True))

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

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """Return the base's permission; see `ExchangeSpec.permit`."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    # The exchange of a fragment as a program of its own, beside the updates of its delay.

    @property
    def beside(self) -> BesideSpec | None:
        """Return the exchange of a fragment as one program; None with devices that share it."""
        # With devices that share a replica's work, its local steps hold collectives already, which
        # the exchange would have to wait for.
        if not self.delay or self.exchange.local_axis_name is not None:
            return None

        def sender(phase: Phase) -> int:
            return next(i for i, turn in enumerate(self.turns()) if turn.event(SEND) in phase)

        def parts(state: OuterState) -> list[OuterState]:
            return views(state, keys_in(state, len(self.turns())))

        def put(state: OuterState, phase: Phase, flight: InFlight) -> OuterState:
            number, after = sender(phase), parts(state)
            after[number] = after[number]._replace(in_flight=flight)
            return joined(state, after, keys_in(state, len(after)))

        def is_behind(state: OuterState, t: int) -> bool:
            # -1 stands for nothing in flight: the base refused it, and none is expected.
            sent = [int(part.in_flight.parts) for part in parts(state)]
            due = [turn.parts_before(t) for turn in self.turns()]
            return any(0 <= x < y for x, y in zip(sent, due, strict=True))

        return BesideSpec(
            without=lambda phase: tuple(
                event for event in phase if event not in [x.event(SEND) for x in self.turns()]
            ),
            sent=lambda state, phase: parts(state)[sender(phase)].in_flight,
            exchange=functools.partial(average_all, exchange=self.exchange, delay=self.delay),
            put=put,
            ends=lambda phase: self.turns()[sender(phase)].event(SLOW) in phase,
            is_behind=is_behind,
        )


def merged(local: PyTree, anchor: PyTree, merge: float) -> PyTree:
    """Return `anchor + merge * (local - anchor)`: the anchor for 0, the local values for 1."""
    if merge == 0:
        return anchor
    if merge == 1:
        return jax.tree.map(lambda x, a: x.astype(a.dtype), local, anchor)
    return jax.tree.map(lambda x, a: a + merge * (x.astype(a.dtype) - a), local, anchor)
