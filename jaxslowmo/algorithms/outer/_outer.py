"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this transform with different outer optimizers. A model is a list of
fragments, whose slow steps are due one after another; as a rule of one fragment, the whole model.

Four words: y are the parameters after the optimizer's update (`landing`); x and its *mass* are the
numerator and weight of push-sum, or of replicas that count differently, so that the mean is the sum
of x over the sum of masses; a *turn* is when the events of one fragment are due.

With a `delay`, taking what a slow step sends and sending it are events of earlier updates; see
`_delay.py`. Source of fragments, `delay` and `merge`: Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, section 3.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from ..._support.checks import as_number, checked_int
from ..._support.types import PyTree
from ...collectives import all_mean, quotient, scaled
from ...mesh import axis_names
from ...transform import (
    Beside,
    Event,
    Every,
    Exchange,
    InnerState,
    Now,
    Operand,
    Others,
    Sync,
    first_sent,
    kept,
    names_of_sent,
    over_stages,
    part_to_send,
    replica_mean,
    require_bound,
    run_if,
    split_mark,
)
from ...tree import Staged, added, apply_exactly, landing, parts_of, subtracted, updates_to
from ._anchor import Anchor, ShardedAnchor, merged
from ._delay import (
    NOTHING,
    InFlight,
    arrived,
    average_part,
    beside_updates,
    dropped,
    nothing_in_flight,
    unless_all_idle,
)
from ._fragments import (
    ALL_LEAVES,
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
    turns_of,
    views,
)
from ._moved import Divided
from ._placement import Placement
from ._state import ALONE, NO_RATE, OuterRate, OuterState

_WHOLE_ANYWHERE = (
    "The state is sharded over that axis; with `shard_state=False` each replica has all of it, and "
    "`init` works anywhere."
)


@dataclass(frozen=True, eq=False)
class Outer(Divided):
    """An outer optimizer that steps an anchor, over a base.

    Attributes:
      owner: public name of the transform, for messages.
      over: the axes of slow steps, and the layout, buckets and codec with which they exchange.
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
      inner_state: what a slow step does to the moments of the inner optimizer.
      specs: layout of the parameters that was given later than the exchange's; shards do not follow
        it, since how they are cut is part of the state.
      is_sharded: whether state is sharded; None: `placement` decides it by the parameters.
      number: the number of fragments of the parameters that it is for, from `on`.
      counts: the numbers of fragments of the models for which a state was made.
    """

    owner: str
    over: Exchange
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    placement: Placement
    base: Sync = ALONE
    exact_average: bool = True
    rate: OuterRate | None = None
    fragments: Fragments = 1
    delay: int = 0
    merge: float = 0.0
    inner_state: InnerState = "keep"
    specs: PyTree | None = None
    is_sharded: bool | None = None
    number: int | None = None
    counts: set[int] = field(default_factory=set, repr=False)
    state = OuterState
    packs = True

    def __post_init__(self) -> None:
        """Raise `ValueError` unless fragments, delay and merge fit the other arguments."""
        owner, merge = self.owner, self.merge
        checked_int(f"{owner}: `delay` counts updates and", self.delay, 0)
        if not callable(self.fragments):
            checked_int(f"{owner}: `fragments`", self.fragments, 1)
            check_turns(owner, self.schedule, self.fragments, self.delay)
        if self.delay and self.schedule.before == "all":
            raise ValueError(
                f'{owner}: `delay` must be 0 for a schedule with before="all", in which updates '
                f"without a distance are due, got {self.delay}."
            )
        share = as_number(merge)
        if share is None or not 0 <= share <= 1:
            raise ValueError(f"{owner}: `merge` must be a number in [0, 1], got {merge!r}.")
        if self.is_spread and not self.exact_average:
            raise ValueError(
                f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is "
                f"nothing to spread or to keep; got fragments={self.fragments!r}, "
                f"delay={self.delay!r}, merge={merge!r}."
            )
        if self.inner_state != "keep" and (self.fragments != 1 or not self.exact_average):
            raise ValueError(
                f'{owner}: `inner_state` must be "keep" with several `fragments`, since it changes '
                "all moments at once, and without an exact average, which exchanges nothing; got "
                f"{self.inner_state!r}."
            )

    @property
    def wrapped(self) -> Sync:
        """See `Sync`; so are the following."""
        return self.base

    @property
    def groups(self) -> list[Exchange]:
        return [self.over]

    @property
    def has_anchor(self) -> bool:
        return True

    @property
    def wants_learning_rate(self) -> bool:
        own = self.rate is not None and self.rate.is_passed
        return own or self.base.wants_learning_rate

    @property
    def shards_whole_leaves(self) -> bool:
        return self.placement.shard_state is not False and self.over.param_specs is None

    @property
    def shard_specs(self) -> PyTree | None:
        return self.over.param_specs if self.placement.shard_state is not False else None

    @property
    def stored(self) -> str:
        return self.placement.text()

    @property
    def is_spread(self) -> bool:
        """Whether slow steps do less than to set all parameters to the anchor at once."""
        return self.fragments != 1 or self.delay != 0 or self.merge != 0

    @property
    def sent_names(self) -> list[str] | None:
        return names_of_sent(self.over.codec, has_view=bool(self.is_sharded))

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
        over = self.over if is_sharded else self.over.with_specs(self.specs)
        base, number = self.base.on(params), len(self.divided(params))
        return replace(self, base=base, over=over, is_sharded=is_sharded, number=number)

    def sized(self, axis_sizes: Mapping[str, int]) -> "Outer":
        """See `Sync.sized`; a step has one of its own, which knows the models of that step."""
        base, placement = self.base.sized(axis_sizes), replace(self.placement, models={})
        return replace(self, base=base, placement=placement, counts=set())

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> "Outer":
        """See `Sync.with_specs`."""
        # The layout of shards is part of the state, so only the argument `param_specs` decides it.
        keeps = self.placement.shard_state is not False and not of_state
        over = self.over if keeps else self.over.with_specs(param_specs)
        base = self.base.with_specs(param_specs)
        return replace(self, base=base, over=over, specs=param_specs)

    # The fragments, and when something is due.

    def divided(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters, of which only shapes and dtypes matter.

        Raises:
          ValueError: the number of fragments does not fit parameters, period and delay.
        """
        if self.fragments == 1:
            return (ALL_LEAVES,)
        fragments = divided(self.owner, self.fragments, params)
        check_turns(self.owner, self.schedule, len(fragments), self.delay)
        self.counts.add(len(fragments))
        return fragments

    def turns(self) -> tuple[Turn, ...]:
        """Return the turn of each fragment.

        Raises:
          ValueError: the number of fragments is that of a function, and no state was made yet, or
            states of models that it divides into different numbers.
        """
        if self.number is not None:
            count = self.number
        elif not callable(self.fragments):
            count = self.fragments
        elif len(self.counts) == 1:
            (count,) = self.counts
        else:
            so_far = f"states with {sorted(self.counts)} fragments" if self.counts else "none"
            raise ValueError(
                f"{self.owner}: `fragments` is a function, so phases are known once `init` has "
                f"made a state, of one model, got {so_far}. For several models make a transform "
                "for each, or a step by js.make_train_step, whose phases are those of its state."
            )
        return turns_of(self.schedule, count, self.delay)

    def events(self) -> list[Event]:
        """Return the events of the base, and those of each fragment.

        With a delay, what is taken in one update is sent in later ones, before it is applied.
        """
        events = [
            self.lifted(replace(event, run=functools.partial(self.unmarked, event.run)), "base")
            for event in self.base.events()
        ]
        for turn in self.turns():
            of_turn = functools.partial(self.event, turn)
            if self.delay:
                events += [
                    # It comes first: where it is not due, taking overwrites what it sent.
                    of_turn(SEND, turn.sends, Outer.send, is_unconditional=self._sends_always),
                    of_turn(TAKE, turn.takes, Outer.take),
                ]
            slow = Outer.land if self.delay else Outer.slow
            events.append(of_turn(SLOW, turn.schedule, slow, replaces=self.replaces_base))
        return events

    def unmarked(self, run: Callable[..., Operand], operand: Operand, now: Now) -> Operand:
        """Run an event of the base, which leaves the moments of the inner optimizer as they are."""
        updates, others, state = operand
        others, mark = split_mark(self, others)
        updates, others, state = run((updates, others, state), now)
        return updates, [*others, *mark], state

    def event(self, turn: Turn, name: str, due: Any, run: Any, **options: Any) -> Event:
        """Return an event of one fragment; `run` is a method for its state alone."""
        missed = functools.partial(self.missed, turn.number) if self.delay else None
        run = functools.partial(self.run, turn.number, run)
        return Event(turn.event(name), due, run, missed=missed, **options)

    @property
    def variant(self) -> tuple[int, Any]:
        """The number of fragments, and the `variant` of the base."""
        return len(self.turns()), self.base.variant

    @property
    def schedules(self) -> tuple[Every, ...]:
        """See `Sync.schedules`."""
        return (self.schedule, *self.base.schedules)

    @property
    def _sends_always(self) -> bool:
        """Whether any update may send: each but one does, which overwrites what it sent."""
        # With a conditional around it the exchange would run beside nothing.
        return 0 < self.delay == self.schedule.k - 1 and len(self.turns()) == 1

    def skipped(self, state: OuterState) -> int:
        """Return the skips of the base other than slow steps; see `Sync.skipped`."""
        slow = self.schedule.times(int(state.count)) if self.replaces_base else 0
        return self.base.skipped(state.base) - slow

    # The state.

    def init(self, params: PyTree) -> OuterState:
        """Return the first state for `params`."""
        outer = self.on(params)
        if outer.is_sharded:  # a whole anchor can be initialised outside of the axis
            require_bound(self.owner, self.over, _WHOLE_ANYWHERE)
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
        base = self.base.init(params)
        parts = []
        for fragment in fragments:
            leaves, storage = fragment.of(params), self.anchor_of(fragment, params)
            anchor = store(storage, leaves)
            outer = storage.pin(self.stepper(fragment).init(anchor), leaves)
            sent = first_sent(self.sent_names, leaves)
            flight = nothing_in_flight(leaves, sent) if self.delay else ()
            parts.append(OuterState(jnp.zeros([], jnp.int32), anchor, outer, base, flight, sent))
        state = joined(parts[0], parts)
        if self.is_sharded:
            self.placement.check_shards(params, jax.tree.leaves(state.anchor))
        return state

    def anchor_of(self, fragment: Fragment, params: PyTree) -> Anchor:
        """Return the storage of a fragment's anchor: whole, or sharded over the replicas."""
        assert self.is_sharded is not None, "`on` decides it from the parameters"
        exchange = exchange_of(fragment, self.over, params)
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

    def anchor(self, state: OuterState, params: PyTree) -> PyTree:
        """Return the anchor of all fragments as a tree like `params`; see `Sync.anchor`."""
        whole, outer, fragments = params, self.on(params), self.divided(params)
        for fragment, part in zip(fragments, views(state, len(fragments)), strict=True):
            storage = outer.anchor_of(fragment, params)
            whole = fragment.put(whole, storage.restore(part.anchor, fragment.of(params)))
        return whole

    def shards(self, state: OuterState) -> list[Any]:
        """Return the arrays that are sharded over replicas; see `Sync.shards`."""
        shards = jax.tree.leaves(state.anchor) if self.placement.last() else []
        return [*shards, *self.base.shards(state.base)]

    # One update.

    def counted(self, state: OuterState, now: Now) -> OuterState:
        """Return the state with counters of this update, after its rate was observed."""
        count = len(self.divided(now.params))
        state = super().counted(state, now)
        rate = self.rate_of(now)
        if self.rate is not None and self.rate.observe is not None and rate is not None:
            observe = self.rate.observe
            parts = [x._replace(outer=observe(x.outer, rate)) for x in views(state, count)]
            state = joined(state, parts)
        return state._replace(base=self.base.counted(state.base, now))

    def local(self, operand: Operand, now: Now) -> Operand:
        """Return the operand of an update without any exchange, which is that of the base."""
        updates, others, state = operand
        updates, others, base = self.base.local((updates, others, state.base), now)
        return updates, others, state._replace(base=base)

    def rate_of(self, now: Now) -> jax.Array | None:
        """Return the inner learning rate; None if the outer optimizer does not use it."""
        if self.rate is None:
            return None
        rate = self.rate.now(now.count - 1, now.extra)
        if self.rate.is_passed and now.weight is not None:
            # The gradient of an idle replica's rate is kept: the rate in use depends on it too.
            away = NO_RATE + (rate - jax.lax.stop_gradient(rate))
            rate = jnp.where(now.weight > 0, rate, away)
        return rate

    def run(self, number: int, step: Callable[..., Operand], operand: Operand, now: Now) -> Operand:
        """Return the operand, with the state of all fragments, after an event of one.

        `step(fragment, now, operand)` has updates and parameters of all leaves; anchor, outer state
        and what is in flight are those of the fragment.
        """
        outer, fragments = self.on(now.params), self.divided(now.params)
        if self.replaces_base:
            operand = self.local(operand, now)
        updates, others, state = operand
        parts = views(state, len(fragments))
        updates, others, parts[number] = step(
            outer, fragments[number], now, (updates, others, parts[number])
        )
        return updates, others, joined(state._replace(base=parts[number].base), parts)

    def missed(self, number: int, operand: Operand, due: Any, now: Now) -> Operand:
        """Drop what is in flight: of a displacement of which a part was not sent is no mean."""
        del now
        updates, others, state = operand
        parts = views(state, len(self.turns()))
        parts[number] = parts[number]._replace(in_flight=dropped(parts[number].in_flight, due))
        return updates, others, joined(state, parts)

    def slow(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Make the slow step with an exchange in this update, unless the base refuses it.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """

        def step(operand: Operand) -> Operand:
            updates, _, state = operand
            y, mass, sent = landing(now.params, updates), None, state.sent
            # D, the pseudo-gradient: the displacement since the last slow step, sign reversed.
            if self.exact_average:
                x, mass = self.numerator(y, now.weight, state.base)
                displacement, sent = self.displacement(fragment, x, mass, now, state)
            else:
                displacement = jax.tree.map(subtracted, state.anchor, y)
            rate = self.rate_of(now)
            return self.moved(fragment, displacement, sent, mass, rate, now, operand)

        allowed, operand = self.permitted(now.params, operand)
        return run_if(allowed, step, lambda operand: operand, operand, axes=self.bound_axes)

    def numerator(
        self, y: PyTree, weight: jax.Array | None, base: PyTree
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the weighted parameters and their weight, None if it is always 1."""
        # A push-sum base returns (w z, w), others (z, None), where None stands for 1.
        x, mass = self.base.numerator(base, y)
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
    ) -> tuple[PyTree, PyTree]:
        """Return D in the anchor's form, and what is remembered of sending it."""
        anchor, params, codec = state.anchor, now.params, self.over.codec
        storage = self.anchor_of(fragment, params)
        if codec is not None:
            parts, anyone = self.parts(fragment, x, mass, state)
            displacement, lost = storage.average_parts(parts)
            return unless_all_idle(anyone, displacement, state.sent, kept(codec, lost))
        average = storage.average(fragment.of(x))
        if mass is not None:
            # sum x / sum w is the exact mean of weighted and push-sum parameters too.
            average = self.per_mass(average, mass, None if now.weight is None else anchor)
        return jax.tree.map(subtracted, anchor, average), state.sent

    def parts(
        self, fragment: Fragment, x: PyTree, mass: jax.Array | None, state: OuterState
    ) -> tuple[PyTree, jax.Array | None]:
        """Return what this replica sends in a codec, and whether any has weight; see `Sent`."""
        # Send D and not x: D is small, and a codec's error is proportional to it.
        x = fragment.of(x)
        z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
        start = state.sent.view if self.is_sharded else state.anchor
        away, lost = jax.tree.map(subtracted, start, z), state.sent.lost if state.sent else ()
        return part_to_send(away, lost, self.over, mass)

    def per_mass(self, average: PyTree, mass: jax.Array, idle: PyTree | None) -> PyTree:
        """Return sum x / sum w of the replicas from mean x; `idle` if all have run out of data."""
        total = all_mean(mass, self.over.axis_name)
        if idle is None:
            return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
        return jax.tree.map(
            lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, idle
        )

    def moved(
        self,
        fragment: Fragment,
        displacement: PyTree,
        sent: PyTree,
        mass: jax.Array | None,
        rate: jax.Array | None,
        now: Now,
        operand: Operand,
    ) -> Operand:
        """Return updates and state after the outer optimizer's step with this displacement."""
        updates, others, state = operand
        others, mark = split_mark(self, others)
        if others and self.exact_average:
            others = replica_mean(others, Exchange(self.over.axis_name), mass)
        others = [*others, *[True] * len(mark)]
        outer, options = state.outer, {}
        if self.rate is not None and rate is not None:
            # With different rates the replicas would diverge, even if each keeps its own anchor.
            if self.rate.agree is not None:
                outer, rate = self.rate.agree(outer, rate, axis_names(self.over.axis_name))
            options = {"learning_rate": rate}
        # Any optax optimizer, with D as its gradient; it runs on shards of a sharded anchor.
        update = self.stepper(fragment).update
        try:
            step, outer = update(displacement, outer, state.anchor, **options)
        except TypeError as error:
            error.add_note(
                f"{self.owner}: `outer_optimizer` is given displacement, state and anchor; there "
                "is no loss for one that needs `value`, `grad` or `value_fn`."
            )
            raise
        anchor = jax.tree.map(added, state.anchor, step)
        state = state._replace(anchor=anchor, outer=outer, sent=sent)
        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        leaves = fragment.of(now.params)
        whole, state = self.restored(fragment, now.params, state)
        target = merged(landing(leaves, fragment.of(updates)), whole, self.merge)
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), leaves, target)
        updates = fragment.put(updates, updates_to(leaves, target))

        def move(tree: PyTree) -> PyTree:
            local = fragment.of(tree)
            new = merged(local, whole, self.merge)
            return fragment.put(tree, jax.tree.map(lambda n, x: n.astype(x.dtype), new, local))

        if self.exact_average:
            # What the base still has under way moves alike.
            base = self.base.settle(state.base, move)
            state = state._replace(base=self.base.reset(base) if self.replaces_base else base)
        return updates, others, state

    def restored(
        self, fragment: Fragment, params: PyTree, state: OuterState
    ) -> tuple[PyTree, OuterState]:
        """Return where all replicas continue, like a fragment's leaves, and the state then."""
        storage, codec = self.anchor_of(fragment, params), self.over.codec
        if codec is None or not isinstance(storage, ShardedAnchor):
            return storage.restore(state.anchor, fragment.of(params)), state
        view = storage.follow(state.sent.view, state.anchor)
        state = state._replace(sent=state.sent._replace(view=view))
        return view, state if codec.error_feedback else state._replace(anchor=storage.store(view))

    def take(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Take what this fragment sends, unless the base refuses it."""
        allowed, operand = self.permitted(now.params, operand)
        updates, others, state = operand
        x, mass = self.numerator(landing(now.params, updates), now.weight, state.base)
        # Weighted values and their weight, whose sums over replicas give the exact mean. The rate
        # goes with them: the displacement was made at it, however late it is applied. A codec sends
        # shares of a mean: all have weight, or none.
        values = fragment.of(x)
        if self.over.codec is not None:
            values, mass = self.parts(fragment, x, mass, state)
        old: InFlight = state.in_flight
        one, rate = jnp.ones_like(old.mass), self.rate_of(now)
        taken = old._replace(
            values=jax.tree.map(lambda new, like: new.astype(like.dtype), values, old.values),
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if rate is None else rate.astype(one.dtype),
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return updates, others, state._replace(in_flight=taken)

    def send(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Average the next part of what is in flight."""
        updates, others, state = operand
        over = exchange_of(fragment, self.over, now.params)
        flight = average_part(state.in_flight, over, self.delay)
        return updates, others, state._replace(in_flight=flight)

    def land(self, fragment: Fragment, now: Now, operand: Operand) -> Operand:
        """Make the slow step with what has arrived, if all of it has."""
        state, storage = operand[2], self.anchor_of(fragment, now.params)
        flight: InFlight = state.in_flight
        average, has_weight = arrived(flight, self.over)
        displacement = storage.store(average)
        if self.over.codec is None:
            displacement = jax.tree.map(subtracted, state.anchor, displacement)
        displacement, sent = unless_all_idle(has_weight, displacement, state.sent, flight.lost)
        _, mass = self.numerator(landing(now.params, operand[0]), now.weight, state.base)
        rate = None if self.rate is None else flight.rate
        after = self.moved(fragment, displacement, sent, mass, rate, now, operand)
        is_whole = flight.parts == self.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        updates, others, state = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old), after, operand
        )
        return updates, others, state._replace(in_flight=dropped(flight, True))

    def permitted(self, params: PyTree, operand: Operand) -> tuple[Any, Operand]:
        """Return whether the base permits what follows, and the operand afterwards."""
        # A base such as only_finite may refuse the step before anything is averaged.
        updates, others, state = operand
        if not self.exact_average:
            return True, operand
        axes = tuple(dict.fromkeys((*axis_names(self.over.axis_name), *self.base.axes)))
        allowed, state = self.permit(state, apply_exactly(params, updates), others, axes)
        return allowed, (updates, others, state)

    def permit(
        self, state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        """Return the base's permission; see `Sync.permit`."""
        allowed, base_state = self.base.permit(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    def shares(self, state: OuterState) -> Any:
        """Return the shares of the base; see `Sync.shares`."""
        return self.base.shares(state.base)

    @property
    def beside(self) -> Beside | None:
        """Return the exchange of a fragment as one program; None with devices that share it."""
        # With devices that share a replica's work, its local steps hold collectives already, which
        # the exchange would have to wait for.
        if not self.delay or self.over.local_axis_name is not None:
            return None
        return beside_updates(self.turns, self.over, self.delay)
