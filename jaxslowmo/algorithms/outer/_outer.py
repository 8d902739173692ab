"""An outer optimizer that steps an anchor by what replicas have moved since its last step.

SlowMo and DiLoCo are this algorithm with different outer optimizers. A model is divided into
fragments, whose slow steps are due one after another. As a rule one fragment is the whole model.

The code uses these symbols. y are the parameters after the inner optimizer's update. x are the
parameters times a weight, and `mass` is that weight: the one of push-sum, or of replicas that count
differently. The mean of the replicas is the sum of x divided by the sum of the masses.

With a `delay`, earlier updates take the values of a slow step ("take") and send them ("send"); see
`InFlight`. Source of fragments, `delay` and `merge`: Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, section 3.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._support.checks import ArgumentError, as_number, checked_int
from ..._support.scopes import MODEL_STATE
from ..._support.types import PyTree
from ...collectives import quotient, scale
from ...transform import (
    Algorithm,
    Carry,
    Event,
    Every,
    InnerPeriods,
    InnerState,
    ReplicaGroup,
    UpdateContext,
    moment_events,
    over_stages,
    run_if,
    update_moments,
    wrap_algorithm,
)
from ...tree import Staged, add, at_least_float32, parts_of, subtract, widen_updates
from .._error_feedback import first_memory, has_leaves, next_residual, part_to_send
from ._aggregate import NormWeighted, RadialDirectional
from ._chunks import AnchorStep, DisplacementFn, slow_step, slow_step_in_chunks
from ._fragments import (
    ALL_LEAVES,
    NOTHING,
    SEND,
    SLOW,
    TAKE,
    Fragment,
    Fragments,
    FragmentSchedule,
    InFlight,
    Layers,
    arrived_mean,
    average_part,
    check_fragment_schedules,
    combine_states,
    fragment_schedules,
    fragment_state,
    make_fragments,
    nothing_in_flight,
    overlapped_exchange,
    with_flight,
    with_state,
)

ALONE = Algorithm(owner="alone")
"""The base of an outer optimizer without one: it exchanges nothing."""

NO_RATE = -1.0  # rate of a replica that has run out of data, whose optimizer made no step


class OuterRate(NamedTuple):
    """The source of the inner learning rate for an outer optimizer.

    Attributes:
      read: `read(count, learning_rate)` returns the rate of an update, from the number of earlier
        updates and the rate that `update` was given.
      observe: `observe(outer, rate)` returns the outer state after any update at this rate; None
        if it does not change.
      is_passed: whether `update` needs the argument `learning_rate`, which may differ between
        replicas: each remembers its largest one, and slow steps observe the largest of all. The
        rate of a replica without data is `NO_RATE`.
      last: `last(outer)`: the rate of the last slow step, for one in which no replica has one.
    """

    read: Callable[[jax.Array, Any], jax.Array]
    observe: Callable[[Any, jax.Array], Any] | None = None
    is_passed: bool = False
    last: Callable[[Any], jax.Array] | None = None


def outer_algorithm(
    owner: str,
    group: ReplicaGroup,
    schedule: Every,
    optimizer: optax.GradientTransformationExtraArgs,
    **settings: Any,
) -> Algorithm:
    """Return the algorithm of an outer optimizer that steps an anchor, over a base; see `_Outer`.

    Raises:
      ValueError: fragments, delay and merge that do not fit the other arguments.
    """
    return _Outer(owner, group, schedule, optimizer, **settings).algorithm()


@dataclass(frozen=True)
class _Outer:
    """The settings of an outer optimizer.

    Attributes:
      owner: public name, for messages.
      group: the replicas, and the buckets and codec with which slow steps exchange.
      schedule: the updates in which slow steps are due; of several fragments, those of the last.
      optimizer: the outer optimizer.
      base: the algorithm that runs between slow steps.
      exact_average: whether a slow step takes the replicas' mean; else each replica continues with
        its parameters after the base's exchange, and has an anchor of its own.
      is_sharded: whether each replica keeps only its blocks of anchor and outer state; None: in a
        training step alone.
      is_element_wise: whether the optimizer has no use for names and shapes of leaves.
      rate: source of the inner learning rate; None if the optimizer does not use it.
      fragments: the fragments.
      delay: number of updates between taking what is sent and applying its mean.
      merge: the share of a replica's own progress that a slow step keeps, in [0, 1].
      inner_state: what a slow step does to the moments of the inner optimizer, or the periods in
        which they are averaged.
      aggregate: how the displacements of replicas become one; None: by their mean.
      bound_fragments: the fragments of the parameters that it is bound to; () before that.
    """

    owner: str
    group: ReplicaGroup
    schedule: Every
    optimizer: optax.GradientTransformationExtraArgs
    base: Algorithm = ALONE
    exact_average: bool = True
    is_sharded: bool | None = False
    is_element_wise: bool = True
    rate: OuterRate | None = None
    fragments: Fragments = 1
    delay: int = 0
    merge: float = 0.0
    inner_state: InnerPeriods = "keep"
    aggregate: RadialDirectional | NormWeighted | None = None
    bound_fragments: tuple[Fragment, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` unless fragments, delay and merge fit the other arguments."""
        owner, merge = self.owner, self.merge
        checked_int(f"{owner}: `delay` counts updates and", self.delay, 0)
        if not isinstance(self.fragments, Layers) and not callable(self.fragments):
            checked_int(f"{owner}: `fragments`", self.fragments, 1)
        if (count := self.num_fragments) is not None:
            check_fragment_schedules(owner, self.schedule, count, self.delay)
        if self.delay and self.schedule.before == "all":
            raise ArgumentError(
                "delay",
                f'{owner}: `delay` must be 0 for a schedule with before="all", in which updates '
                f"without a distance are due, got {self.delay}.",
            )
        share = as_number(merge)
        if share is None or not 0 <= share <= 1:
            raise ArgumentError(
                "merge", f"{owner}: `merge` must be a number in [0, 1], got {merge!r}."
            )
        if self.is_spread and not self.exact_average:
            raise ValueError(
                f"{owner}: `exact_average=False` exchanges nothing in slow steps that could be "
                f"spread; got fragments={self.fragments!r}, delay={self.delay!r}, merge={merge!r}."
            )
        if self.to_moments != "keep" and (self.fragments != 1 or not self.exact_average):
            raise ArgumentError(
                "inner_state",
                f'{owner}: `inner_state` must be "keep" with several `fragments`, since it changes '
                f"all moments at once, and without an exact average; got {self.inner_state!r}.",
            )

    @property
    def num_fragments(self) -> int | None:
        """The number of fragments; None: a function gives it, and the parameters are not known."""
        if isinstance(self.fragments, Layers):
            return self.fragments.count
        return (len(self.bound_fragments) or None) if callable(self.fragments) else self.fragments

    @property
    def to_moments(self) -> InnerState:
        """Return what a slow step does to all moments."""
        return moment_events(self.owner, self.inner_state, self.group)[0]

    @functools.cached_property
    def wrapped_base(self) -> Algorithm:
        """The base, whose local state is the "base" of the whole."""
        return wrap_algorithm(self.base)

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

    def algorithm(
        self, axis_sizes: Mapping[str, int] | None = None, params: PyTree | None = None
    ) -> Algorithm:
        """Return the algorithm for these parameters; see `Algorithm.bind`."""
        base, group = self.base.bound(axis_sizes, params), self.group
        if isinstance(self.fragments, Layers):
            group = replace(group, without=(self.fragments.where, self.fragments.axis))
        elif self.fragments != 1 and parts_of(params, Staged):  # cut along the last dimension
            group = replace(group, without=(lambda name: True, -1))
        fragments = self.bound_fragments if params is None else self.make_fragments(params)
        if self.aggregate is not None and parts_of(params, Staged):
            raise ArgumentError(
                "aggregate",
                f'{self.owner}: `aggregate` must be "mean" for a model in stages, each of which '
                f"has its own leaves, got {self.aggregate!r}.",
            )
        # A base that has all of its shared state on each replica has no use for blocks.
        fits = base.is_sharded or base.shared is ALONE.shared
        # Each stage steps its own leaves, in a branch that the others do not take, so no norm there
        # may be a sum over replicas.
        fits = fits and (self.is_sharded is not None or not parts_of(params, Staged))
        is_sharded = self.is_sharded if fits else False
        group = replace(group, is_cut=is_sharded)
        bound = replace(
            self, base=base, group=group, bound_fragments=fragments, is_sharded=is_sharded
        )
        wrapped_base = bound.wrapped_base
        algorithm = Algorithm(
            groups=(*base.groups, group),
            local=bound.first_local_state,
            shared=bound.first_shared_state,
            mass=wrapped_base.mass,
            counts_alike=base.counts_alike,
            reset=wrapped_base.reset,
            owner=self.owner,
            is_sharded=is_sharded,
            begin=bound.begin,
            needs_rate=base.needs_rate or (self.rate is not None and self.rate.is_passed),
            count=wrapped_base.count,
            permit=wrapped_base.permit,
            has_anchor=True,
            bind=bound.algorithm,
        )
        needs = base.needs
        if bound.num_fragments is None:
            needs = (
                "`fragments` is a function, so phases are known for parameters alone: take those "
                "of `transform.bound(params=params)`, or of a training step."
            )
        if needs or bound.num_fragments is None:
            return replace(algorithm, needs=needs)
        schedules = fragment_schedules(self.schedule, bound.num_fragments, self.delay)
        overlapped = None
        if self.delay and self.group.local_axis_name is None:
            # With devices that share a replica's work, its local steps hold collectives already,
            # which the exchange would have to wait for.
            overlapped = overlapped_exchange(schedules, replace(group, without=None), self.delay)
        return replace(algorithm, events=bound.events(schedules), overlapped=overlapped)

    def make_fragments(self, params: PyTree) -> tuple[Fragment, ...]:
        """Return the fragments of these parameters."""
        if self.fragments == 1:
            return (ALL_LEAVES,)
        if parts_of(params, Staged) and not self.is_element_wise:
            raise ArgumentError(
                "fragments",
                f"{self.owner}: with `fragments`, parts of the flat buffers of stages, "
                "`outer_optimizer` must be element-wise, as shard_state=True promises.",
            )
        return make_fragments(self.owner, self.fragments, params)

    def events(self, schedules: tuple[FragmentSchedule, ...]) -> tuple[Event, ...]:
        """Return the events of the base, and those of each fragment.

        With a delay, what is taken in one update is sent in later ones, before it is applied.
        """
        events = [_wrap_shared_state(event) for event in self.wrapped_base.events]
        for schedule in schedules:
            event = functools.partial(self.event, schedule)
            slow_options = {"replaces": self.replaces_base, "inner_state": self.to_moments}
            if not self.delay:
                events.append(event(SLOW, schedule.every, _SlowStep.run, **slow_options))
                continue
            missed = functools.partial(_drop_in_flight, number=schedule.number)
            # With a conditional around it the exchange would run beside nothing. Where any update
            # but one sends, that one overwrites what it sent.
            always = self.delay == self.schedule.k - 1 and len(schedules) == 1
            send_options = {"missed": missed, "is_unconditional": always}
            events += [
                # It comes first: where it is not due, taking overwrites what it sent.
                event(SEND, schedule.sends, _SlowStep.send, **send_options),
                event(TAKE, schedule.takes, _SlowStep.take, missed=missed),
                event(SLOW, schedule.every, _SlowStep.apply, missed=missed, **slow_options),
            ]
        return (*events, *moment_events(self.owner, self.inner_state, self.group)[1])

    def event(
        self,
        schedule: FragmentSchedule,
        name: str,
        due: Callable[[Any], Any],
        do: "Callable[[_SlowStep, Carry], Carry]",
        **options: Any,
    ) -> Event:
        """Return an event of the fragment with this schedule."""

        def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext) -> Carry:
            fragment = self.bound_fragments[schedule.number]
            replicas = replicas.for_leaves(carry.before, fragment.places, fragment.unflatten)
            return do(_SlowStep(self, fragment, replicas, context), carry)

        return Event(schedule.event(name), due, run, self.group, **options)

    # The state.

    def first_local_state(self, params: PyTree) -> dict[str, Any]:
        """Return the first state of a replica."""
        state: dict[str, Any] = {"base": self.base.local(params)}
        if self.rate is not None and self.rate.is_passed:
            # The largest rate since the last slow step of each fragment.
            state["rates"] = jnp.zeros([max(1, len(self.bound_fragments))], jnp.float32)
        if not self.exact_average:
            state |= self.first_outer_state(params)
        if self.group.codec is not None:
            state["sent"] = first_memory(
                self.group.codec, params, has_reference=bool(self.is_sharded)
            )
        if self.delay:
            residual = state["sent"].residual if "sent" in state else ()
            state["in_flight"] = tuple(
                nothing_in_flight(x.select(params), _select_residual(x, residual))
                for x in self.bound_fragments
            )
        return state

    def first_shared_state(self, params: PyTree) -> dict[str, Any]:
        """Return the first state of all replicas, for parameters or their blocks."""
        base = {"base": self.base.shared(params)}
        return base | self.first_outer_state(params) if self.exact_average else base

    def first_outer_state(self, params: PyTree) -> dict[str, Any]:
        """Return the first anchor, and the state of the outer optimizer."""
        # The anchor sums many small displacements, which half precision would lose.
        anchor = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)
        states = [self.stepper(params, x).init(x.select(anchor)) for x in self.bound_fragments]
        return {"anchor": anchor, "outer": combine_states(states, self.bound_fragments, anchor)}

    def stepper(self, params: PyTree, fragment: Fragment) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer of a fragment's anchor.

        On stages of a pipeline it sees the model's own leaves, or parts of buffers as they are.
        """
        is_flat = self.is_element_wise or fragment.places is not None
        if is_flat or not parts_of(params, Staged):
            return self.optimizer
        return over_stages(self.optimizer, "outer_optimizer")

    def begin(self, updates: PyTree, local: Any, shared: Any, context: UpdateContext) -> Any:
        """Do what the base does in any update, and observe the learning rate."""
        if self.wrapped_base.begin is not None:
            updates, local, inner = self.wrapped_base.begin(updates, local, shared["base"], context)
            shared = shared | {"base": inner}
        rate = self.rate_of(context)
        if self.rate is None or rate is None:
            return updates, local, shared
        if self.rate.is_passed:
            largest = jnp.maximum(local["rates"], jnp.asarray(rate, jnp.float32))
            return updates, local | {"rates": largest}, shared
        if self.rate.observe is None:
            return updates, local, shared
        state = shared if self.exact_average else local
        outer = state["outer"]
        for fragment in self.bound_fragments:
            one = fragment_state(outer, fragment, self.optimizer.init, state["anchor"])
            outer = with_state(outer, fragment, self.rate.observe(one, rate), state["anchor"])
        state = state | {"outer": outer}
        return (updates, local, state) if self.exact_average else (updates, state, shared)

    def rate_of(self, context: UpdateContext) -> jax.Array | None:
        """Return the inner learning rate; None if the outer optimizer does not use it."""
        if self.rate is None:
            return None
        rate = self.rate.read(context.count - 1, context.learning_rate)
        if self.rate.is_passed and context.weight is not None:
            # The gradient of an idle replica's rate is kept: the rate in use depends on it too.
            away = NO_RATE + (rate - jax.lax.stop_gradient(rate))
            rate = jnp.where(context.weight > 0, rate, away)
        return rate


@dataclass(frozen=True)
class _SlowStep:
    """The slow step of a fragment in one update, which its events call.

    Attributes:
      outer: the settings.
      fragment: the fragment.
      replicas: the replicas that exchange, for the leaves of the fragment.
      context: facts about the update.
    """

    outer: _Outer
    fragment: Fragment
    replicas: ReplicaGroup
    context: UpdateContext

    # The events.

    def run(self, carry: Carry) -> Carry:
        """Make the slow step with an exchange in this update, unless the base refuses it.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        allowed, carry = self.ask_base(carry)
        before = carry.before  # passes through no conditional
        return run_if(
            allowed,
            lambda carry: self.exchange(carry._replace(before=before))._replace(before=()),
            lambda carry: carry,
            carry._replace(before=()),
            axes=(*self.outer.group.bound_axes, *self.outer.base.bound_axes),
        )._replace(before=before)

    def take(self, carry: Carry) -> Carry:
        """Take what this fragment sends, unless the base refuses it."""
        allowed, carry = self.ask_base(carry)
        # Weighted values and their weight, whose sums over replicas give the exact mean. The rate
        # goes with them: the displacement was made at it, however late it is applied. A codec sends
        # shares of a mean: all have weight, or none.
        values, mass = self.weighted_values(carry)
        if self.outer.group.codec is not None:
            values, mass = self.displacement_to_send(values, mass, carry)
        old = self.flight(carry)
        one, rate = jnp.ones_like(old.mass), self.outer.rate_of(self.context)
        taken = old._replace(
            values=jax.tree.map(lambda new, like: new.astype(like.dtype), values, old.values),
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if rate is None else rate.astype(one.dtype),
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return self.with_flight(carry, taken)

    def send(self, carry: Carry) -> Carry:
        """Average the next part of what is in flight."""
        flight = average_part(self.flight(carry), self.replicas, self.outer.delay)
        return self.with_flight(carry, flight)

    def apply(self, carry: Carry) -> Carry:
        """Make the slow step with what has arrived, if all of it has."""
        flight, replicas, rate = self.flight(carry), self.replicas, self.outer.rate
        average, has_weight = arrived_mean(flight, replicas)
        displacement = replicas.block(average)
        if self.outer.group.codec is None:
            anchor = self.fragment.select(carry.shared["anchor"])
            displacement = jax.tree.map(subtract, anchor, displacement)
            displacement = jax.tree.map(lambda x: jnp.where(has_weight, x, 0), displacement)
            after = carry
        else:
            displacement, after = self.update_residual(
                displacement, flight.residual, has_weight, carry
            )
        _, mass = self.weighted_params(carry)
        taken_at = None
        if rate is not None:
            taken_at = flight.rate if rate.is_passed else replicas.plain.same(flight.rate)
        after = self.outer_step(displacement, mass, taken_at, after)
        is_whole = replicas.plain.same(flight.parts) == self.outer.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        after = jax.tree.map(
            lambda new, old: jnp.where(is_whole, new, old),
            after._replace(before=()),
            carry._replace(before=()),
        )
        return self.with_flight(after._replace(before=carry.before), flight.drop())

    def flight(self, carry: Carry) -> InFlight:
        """Return what is in flight of the fragment."""
        return carry.local["in_flight"][self.fragment.number]

    def with_flight(self, carry: Carry, flight: InFlight) -> Carry:
        """Return the carry with this in flight of the fragment."""
        return carry._replace(local=with_flight(carry.local, self.fragment.number, flight))

    # The parts of the events.

    def ask_base(self, carry: Carry) -> tuple[bool | jax.Array, Carry]:
        """Return whether the base, such as `only_finite`, permits the exchange, and the carry."""
        outer, permit = self.outer, self.outer.wrapped_base.permit
        if permit is None or not outer.exact_average:
            return True, carry
        axes = tuple(dict.fromkeys((*outer.group.axes, *outer.base.axes)))
        allowed, local = permit(carry, replace(self.replicas.plain, axis_name=axes))
        return allowed, carry._replace(local=local)

    def exchange(self, carry: Carry) -> Carry:
        """Exchange and make the slow step."""
        # D, the pseudo-gradient: the displacement since the last slow step, sign reversed.
        rate = self.outer.rate_of(self.context)
        if not self.outer.exact_average:
            displacement = jax.tree.map(subtract, carry.local["anchor"], carry.params)
            return self.outer_step(displacement, None, rate, carry)
        x, mass = self.weighted_values(carry)
        if self.outer.group.codec is None:
            return self.exchange_and_step(x, self.displacement_fn(mass), mass, rate, carry)
        parts, anyone = self.displacement_to_send(x, mass, carry)
        displacement, lost = self.replicas.mean_scatter_in_codec(parts, role="slow")
        displacement, carry = self.update_residual(displacement, lost, anyone, carry)
        return self.outer_step(displacement, mass, rate, carry)

    def weighted_params(self, carry: Carry) -> tuple[PyTree, jax.Array | None]:
        """Return the weighted parameters and their weight, None if it is always 1."""
        x, weight, base = carry.params, self.context.weight, self.outer.wrapped_base
        mass: jax.Array | None = None
        pairs = None
        if base.mass is not None and not base.counts_alike:
            pairs = base.mass(carry.local)
        if pairs is not None:

            def weighted_sum(leaf: jax.Array, *others: jax.Array) -> jax.Array:
                terms = zip(pairs, (leaf, *others), strict=True)
                return sum(
                    (w.astype(leaf.dtype) * x.astype(leaf.dtype) for (w, _), x in terms),
                    start=jnp.zeros_like(leaf),
                )

            x = jax.tree.map(weighted_sum, x, *(tree for _, tree in pairs[1:]))
            mass = jnp.asarray(sum(w for w, _ in pairs))
        if weight is not None:
            x = jax.tree.map(lambda leaf: scale(leaf, weight), x)
            mass = weight if mass is None else scale(mass, weight)
        return x, mass

    def weighted_values(self, carry: Carry) -> tuple[PyTree, jax.Array | None]:
        """Return the fragment's weighted parameters and their weight.

        With `norm_weighted` both are reduced where this replica moved further than others.
        """
        x, mass = self.weighted_params(carry)
        x, aggregate = self.fragment.select(x), self.outer.aggregate
        if not isinstance(aggregate, NormWeighted):
            return x, mass
        v = local_displacement(x, mass, self.fragment.select(carry.shared["anchor"]))
        factor = aggregate.factor(v, mass, self.replicas)
        x = jax.tree.map(lambda leaf: scale(leaf, factor), x)
        return x, factor if mass is None else scale(mass, factor)

    def displacement_fn(self, mass: jax.Array | None) -> DisplacementFn:
        """Return the function that exchanges and makes D from weighted parameters and anchor."""
        # sum x / sum w is the exact mean of weighted and push-sum parameters too.
        aggregate = self.outer.aggregate
        if isinstance(aggregate, RadialDirectional):
            return lambda group, x, anchor: aggregate.combine(
                local_displacement(x, mass, anchor), mass, group
            )
        total = None if mass is None else self.replicas.mean_number(mass)

        def mean_of(leaf: jax.Array, old: jax.Array) -> jax.Array:
            if total is None:
                return leaf
            if self.context.weight is None and aggregate is None:
                return leaf / total.astype(leaf.dtype)
            # If all have run out of data, the anchor stays.
            return jnp.where(total > 0, quotient(leaf, total), old)

        def mean_displacement(group: ReplicaGroup, x: PyTree, anchor: PyTree) -> PyTree:
            mean = jax.tree.map(mean_of, group.mean_scatter(x, role="slow"), anchor)
            return jax.tree.map(subtract, anchor, mean)

        return mean_displacement

    def displacement_to_send(
        self, x: PyTree, mass: jax.Array | None, carry: Carry
    ) -> tuple[PyTree, jax.Array | None]:
        """Return what this replica sends in a codec, and whether any has weight."""
        # Send D and not x: D is small, and a codec's error is proportional to it.
        sent, select = carry.local["sent"], self.fragment.select
        start = select(sent.reference if self.outer.is_sharded else carry.shared["anchor"])
        residual = _select_residual(self.fragment, sent.residual)
        return part_to_send(local_displacement(x, mass, start), residual, self.replicas, mass)

    def update_residual(
        self, displacement: PyTree, lost: PyTree, anyone: jax.Array | None, carry: Carry
    ) -> tuple[PyTree, Carry]:
        """Return D, and the carry with the residual after the exchange.

        Args:
          displacement: the mean of what replicas sent.
          lost: what this replica could not send of its part in the codec.
          anyone: () bool, whether any replica has weight; None: one has. Else D is 0, and the
            residual stays as it was.
          carry: the carry before the exchange.
        """
        sent, codec = carry.local["sent"], self.replicas.codec
        residual = () if codec is None else next_residual(codec, lost)
        if anyone is not None:
            displacement = jax.tree.map(lambda x: jnp.where(anyone, x, 0), displacement)
        if has_leaves(residual):
            old = self.fragment.select(sent.residual)
            if anyone is not None:
                residual = jax.tree.map(functools.partial(jnp.where, anyone), residual, old)
            sent = sent._replace(residual=self.fragment.write(sent.residual, residual))
        return displacement, carry._replace(local=carry.local | {"sent": sent})

    def outer_step(
        self, displacement: PyTree, mass: jax.Array | None, rate: jax.Array | None, carry: Carry
    ) -> Carry:
        """Return the carry after an outer step with D, of which this replica has its blocks."""
        step, anchor, outer, after = self.prepare_step(mass, rate, carry)
        anchor, outer = step(displacement, anchor, outer)
        whole, anchor, after = self.gather_anchor(anchor, after)
        return self.set_params(whole, anchor, outer, after, carry)

    def exchange_and_step(
        self,
        x: PyTree,
        displacement_fn: DisplacementFn,
        mass: jax.Array | None,
        rate: jax.Array | None,
        carry: Carry,
    ) -> Carry:
        """Return the carry after an outer step with D = `displacement_fn(replicas, x, anchor)`.

        x are the weighted parameters, of which large leaves are taken in chunks.
        """
        step, anchor, outer, after = self.prepare_step(mass, rate, carry)
        run = slow_step
        if self.outer.is_element_wise:
            run = functools.partial(slow_step_in_chunks, count=self.context.count)
        whole, anchor, outer = run(displacement_fn, step, self.replicas, x, anchor, outer)
        return self.set_params(whole, anchor, outer, after, carry)

    def prepare_step(
        self, mass: jax.Array | None, rate: jax.Array | None, carry: Carry
    ) -> tuple[AnchorStep, PyTree, Any, Carry]:
        """Return the outer optimizer's step, the fragment's anchor and outer state, and the carry.

        The carry's statistics are averaged, and replicas have agreed on the rate.
        """
        settings, fragment = self.outer, self.fragment
        if carry.statistics and settings.exact_average:
            with jax.named_scope(MODEL_STATE):
                means = self.replicas.plain.mean(carry.statistics, mass)
            carry = carry._replace(statistics=means)
        state, options = carry.shared if settings.exact_average else carry.local, {}
        stepper, anchor = settings.stepper(carry.before, fragment), fragment.select(state["anchor"])
        outer = fragment_state(state["outer"], fragment, stepper.init, state["anchor"])
        if settings.rate is not None and rate is not None:
            outer, rate, carry = self.agree_on_rate(settings.rate, outer, rate, carry)
            options = {"learning_rate": rate}

        # Any optax optimizer, with D as its gradient; it runs on blocks of a sharded anchor.
        def step(displacement: PyTree, anchor: PyTree, outer: Any) -> tuple[PyTree, Any]:
            try:
                step, outer = stepper.update(displacement, outer, anchor, **options)
            except TypeError as error:
                error.add_note(
                    f"{settings.owner}: `outer_optimizer` is given displacement, state and anchor; "
                    "there is no loss for one that needs `value`, `grad` or `value_fn`."
                )
                raise
            return jax.tree.map(add, anchor, step), outer

        return step, anchor, outer, carry

    def set_params(
        self, whole: PyTree, anchor: PyTree, outer: Any, carry: Carry, old: Carry
    ) -> Carry:
        """Return the carry with a new anchor and outer state, and parameters set to the anchor.

        Args:
          whole: the fragment's whole new anchor, or where all replicas continue instead.
          anchor: this replica's blocks of it.
          outer: the fragment's outer state.
          carry: the carry after the step.
          old: the carry before it.
        """
        settings, fragment = self.outer, self.fragment
        state = carry.shared if settings.exact_average else carry.local
        outer = with_state(state["outer"], fragment, outer, state["anchor"])
        new = {"anchor": fragment.write(state["anchor"], anchor), "outer": outer}
        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        target = merge_params(fragment.select(carry.params), whole, settings.merge)
        # Rounded as the parameters are: all replicas go on from one value.
        leaves = fragment.select(carry.before)
        target = widen_updates(jax.tree.map(lambda p, t: t.astype(p.dtype), leaves, target))
        carry = carry._replace(params=fragment.write(carry.params, target))

        def move(tree: PyTree) -> PyTree:
            local = fragment.select(tree)
            new = merge_params(local, whole, settings.merge)
            return fragment.write(tree, jax.tree.map(lambda n, x: n.astype(x.dtype), new, local))

        if settings.exact_average:
            # What the base still has under way moves alike.
            base, local = settings.wrapped_base, carry.local
            local = local if base.move is None else base.move(local, move)
            local = base.reset(local) if settings.replaces_base else local
            carry = carry._replace(local=local, shared=carry.shared | new)
        else:
            carry = carry._replace(local=carry.local | new)
        return update_moments(old, carry, self.replicas, self.context, settings.to_moments)

    def agree_on_rate(
        self, source: OuterRate, outer: Any, rate: jax.Array, carry: Carry
    ) -> tuple[Any, jax.Array, Carry]:
        """Return outer state and rate, equal on all replicas, and the carry then.

        With different rates replicas would diverge, even if each keeps its own anchor.

        Communication: for rates that are passed one all-reduce of 8 bytes.
        """
        if not source.is_passed:
            return outer, rate, carry
        assert source.observe is not None
        assert source.last is not None
        rates, number = carry.local["rates"], self.fragment.number
        largest, since = self.replicas.plain.largest(
            jnp.stack([rate.astype(rates.dtype), rates[number]])
        )
        outer = source.observe(outer, since)
        rate = jnp.where(largest == NO_RATE, source.last(outer), largest)
        local = carry.local | {"rates": rates.at[number].set(0.0)}
        return outer, rate, carry._replace(local=local)

    def gather_anchor(self, anchor: PyTree, carry: Carry) -> tuple[PyTree, PyTree, Carry]:
        """Return where all replicas continue, the anchor, and the carry then."""
        fragment, replicas = self.fragment, self.replicas
        leaves, codec = fragment.select(carry.before), replicas.codec
        if not self.outer.exact_average:  # each replica has an anchor of its own
            return anchor, anchor, carry
        if codec is None or not self.outer.is_sharded:
            return replace(replicas, codec=None).all_gather(anchor, leaves), anchor, carry
        # Replicas follow the anchor in the codec. What it does not send of the way stays between
        # the two, and is part of the next way.
        sent = carry.local["sent"]
        reference = fragment.select(sent.reference)
        way = jax.tree.map(subtract, anchor, replicas.block(reference))
        reference = jax.tree.map(add, reference, replicas.all_gather(way, leaves, codec=codec))
        sent = sent._replace(reference=fragment.write(sent.reference, reference))
        carry = carry._replace(local=carry.local | {"sent": sent})
        return reference, anchor if codec.error_feedback else replicas.block(reference), carry


def local_displacement(x: PyTree, mass: jax.Array | None, anchor: PyTree) -> PyTree:
    """Return anchor - x / mass: the displacement of one replica, sign reversed."""
    z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
    return jax.tree.map(subtract, anchor, z)


def merge_params(local: PyTree, anchor: PyTree, merge: float) -> PyTree:
    """Return `anchor + merge * (local - anchor)`: the anchor for 0, the local values for 1."""
    if merge == 0:
        return anchor
    if merge == 1:
        return jax.tree.map(lambda x, a: x.astype(a.dtype), local, anchor)
    return jax.tree.map(lambda x, a: a + merge * (x.astype(a.dtype) - a), local, anchor)


def _select_residual(fragment: Fragment, residual: PyTree) -> PyTree:
    """Return the fragment's part of the residual; () without one."""
    return fragment.select(residual) if has_leaves(residual) else ()


def _wrap_shared_state(event: Event) -> Event:
    """Return an event of the base, whose shared state is the "base" of the whole."""

    def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext) -> Carry:
        inner = event.run(carry._replace(shared=carry.shared["base"]), replicas, context)
        return inner._replace(shared=carry.shared | {"base": inner.shared})

    return replace(event, run=run)


def _drop_in_flight(local: Any, due: Any, *, number: int) -> Any:
    """Drop what is in flight where `due`: one part was not sent, so there is no mean of all."""
    return with_flight(local, number, local["in_flight"][number].drop(due))


def resolve_shard_state(
    owner: str,
    shard_state: bool | None,
    group: ReplicaGroup,
    *,
    exact_average: bool = True,
    is_element_wise: bool = True,
) -> bool | None:
    """Return whether anchor and outer state are sharded, for the argument `shard_state`.

    None means that they are in a training step, and are not in a loop of one's own.

    Raises:
      ValueError: a codec without an exchange.
    """
    codec = group.codec
    if codec is not None and not exact_average:
        raise ArgumentError(
            "codec",
            f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is nothing "
            f"for `codec`; got {codec!r}. Give it to the `base`.",
        )
    # From blocks the step would be made sparse a second time, on its way to the parameters.
    is_sparse = codec is not None and codec.is_sparse
    if shard_state is not None:
        return shard_state
    if not is_element_wise:  # in a step it sees whole arrays
        return None if codec is None else False
    return exact_average and not is_sparse
