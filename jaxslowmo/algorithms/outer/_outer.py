"""An outer optimizer on the displacement of the replicas since the last slow step.

SlowMo and DiLoCo are this algorithm with different outer optimizers. A model is a list of
fragments, whose slow steps are due one after another; as a rule of one fragment, the whole model.

Two words: y are the parameters after the optimizer's update; x and its *mass* are the weighted
parameters and the weight of push-sum, or of replicas that count differently, so that the mean is
the sum of x over the sum of masses.

With a `delay`, taking what a slow step sends and sending it are events of earlier updates; see
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
from ._blocks import DisplacementFn, slow_step, slow_step_in_blocks
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

NO_RATE = -1.0  # marks a replica that has run out of data, whose optimizer has not counted on


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
      known: the fragments of the parameters that it is bound to; () before that.
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
    known: tuple[Fragment, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` unless fragments, delay and merge fit the other arguments."""
        owner, merge = self.owner, self.merge
        checked_int(f"{owner}: `delay` counts updates and", self.delay, 0)
        if isinstance(self.fragments, Layers):
            check_fragment_schedules(owner, self.schedule, self.fragments.count, self.delay)
        elif not callable(self.fragments):
            checked_int(f"{owner}: `fragments`", self.fragments, 1)
            check_fragment_schedules(owner, self.schedule, self.fragments, self.delay)
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
                f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is "
                f"nothing to spread or to keep; got fragments={self.fragments!r}, "
                f"delay={self.delay!r}, merge={merge!r}."
            )
        if self.to_moments != "keep" and (self.fragments != 1 or not self.exact_average):
            raise ArgumentError(
                "inner_state",
                f'{owner}: `inner_state` must be "keep" with several `fragments`, since it changes '
                "all moments at once, and without an exact average, which exchanges nothing; got "
                f"{self.inner_state!r}.",
            )

    @property
    def to_moments(self) -> InnerState:
        """It says what a slow step does to all moments."""
        return moment_events(self.owner, self.inner_state, self.group)[0]

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
        known = self.known if params is None else self.make_fragments(params)
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
        bound = replace(self, base=base, group=group, known=known, is_sharded=is_sharded)
        inside = wrap_algorithm(base)
        algorithm = Algorithm(
            groups=(*base.groups, group),
            local=bound.first_local_state,
            shared=bound.first_shared_state,
            mass=inside.mass,
            counts_alike=base.counts_alike,
            reset=inside.reset,
            owner=self.owner,
            is_sharded=is_sharded,
            begin=bound.begin,
            needs_rate=base.needs_rate or (self.rate is not None and self.rate.is_passed),
            count=inside.count,
            permit=inside.permit,
            has_anchor=True,
            bind=bound.algorithm,
        )
        count = self.fragments
        if isinstance(count, Layers):
            count = count.count
        elif callable(count):
            if not known:
                needs = (
                    "`fragments` is a function, so phases are known for parameters alone: take "
                    "those of `transform.bound(params=params)`, or of a training step."
                )
                return replace(algorithm, needs=needs)
            count = len(known)
            check_fragment_schedules(self.owner, self.schedule, count, self.delay)
        if base.needs:
            return replace(algorithm, needs=base.needs)
        schedules = fragment_schedules(self.schedule, count, self.delay)
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
                f"{self.owner}: `fragments` of a model in stages are parts of its flat buffers, so "
                "`outer_optimizer` must be element-wise, which shard_state=True promises. Use "
                "fragments=1 with one that is not.",
            )
        return make_fragments(self.owner, self.fragments, params)

    def events(self, schedules: tuple[FragmentSchedule, ...]) -> tuple[Event, ...]:
        """Return the events of the base, and those of each fragment.

        With a delay, what is taken in one update is sent in later ones, before it is applied.
        """
        events = [_wrap_shared_state(event) for event in wrap_algorithm(self.base).events]
        for schedule in schedules:
            number = schedule.number

            def event(
                name: str, due: Any, run: Any, schedule: FragmentSchedule = schedule, **options: Any
            ) -> Event:
                run = functools.partial(run, number=schedule.number)
                return Event(schedule.event(name), due, run, self.group, **options)

            of_slow = {"replaces": self.replaces_base, "inner_state": self.to_moments}
            if not self.delay:
                events.append(event(SLOW, schedule.every, self.slow, **of_slow))
                continue
            missed = functools.partial(_drop_in_flight, number=number)
            # With a conditional around it the exchange would run beside nothing. Where any update
            # but one sends, that one overwrites what it sent.
            always = self.delay == self.schedule.k - 1 and len(schedules) == 1
            events += [
                # It comes first: where it is not due, taking overwrites what it sent.
                event(SEND, schedule.sends, self.send, missed=missed, is_unconditional=always),
                event(TAKE, schedule.takes, self.take, missed=missed),
                event(SLOW, schedule.every, self.apply_in_flight, missed=missed, **of_slow),
            ]
        return (*events, *moment_events(self.owner, self.inner_state, self.group)[1])

    # The state.

    def first_local_state(self, params: PyTree) -> dict[str, Any]:
        """Return the first state of a replica."""
        state: dict[str, Any] = {"base": self.base.local(params)}
        if self.rate is not None and self.rate.is_passed:
            # The largest rate since the last slow step of each fragment.
            state["rates"] = jnp.zeros([max(1, len(self.known))], jnp.float32)
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
                for x in self.known
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
        states = [self.stepper(params, x).init(x.select(anchor)) for x in self.known]
        return {"anchor": anchor, "outer": combine_states(states, self.known, anchor)}

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
        base = wrap_algorithm(self.base)
        if base.begin is not None:
            updates, local, inner = base.begin(updates, local, shared["base"], context)
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
        for fragment in self.known:
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

    # The events of one fragment.

    def slow(
        self, carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, number: int
    ) -> Carry:
        """Make the slow step with an exchange in this update, unless the base refuses it.

        D = anchor - average;  anchor <- anchor + optimizer(D);  params = anchor
        """
        fragment = self.known[number]
        replicas = _fragment_group(fragment, replicas, carry.before)

        def step(carry: Carry) -> Carry:
            mass, displacement_fn = None, None
            # D, the pseudo-gradient: the displacement since the last slow step, sign reversed.
            if not self.exact_average:
                state = self.outer_state(carry)
                values = jax.tree.map(subtract, state["anchor"], carry.params)
            else:
                x, mass = self.weighted_params(carry, context)
                values, mass = self.weigh_by_norm(
                    fragment, fragment.select(x), mass, replicas, carry
                )
                if self.group.codec is None:
                    displacement_fn = self.displacement_fn(mass, replicas, context)
                else:
                    parts, anyone = self.displacement_to_send(
                        fragment, values, mass, replicas, carry
                    )
                    values, lost = replicas.reduce_scatter_in_codec(parts, role="slow")
                    values, carry = self.update_residual(
                        fragment, anyone, values, lost, carry, replicas
                    )
            rate = self.rate_of(context)
            return self.apply_outer_step(
                fragment, values, mass, rate, replicas, context, carry, displacement_fn
            )

        return self.permit_step(step, carry, replicas)

    def permit_step(
        self, step: Callable[[Carry], Carry], carry: Carry, replicas: ReplicaGroup
    ) -> Carry:
        """Return `step(carry)`, unless the base, such as `only_finite`, refuses the exchange."""
        permit = wrap_algorithm(self.base).permit
        if permit is None or not self.exact_average:
            return step(carry)
        allowed, local = permit(carry, replace(replicas.plain, axis_name=self.axes))
        carry = carry._replace(local=local)
        axes = (*self.group.bound_axes, *self.base.bound_axes)
        before = carry.before  # passes through no conditional
        return run_if(
            allowed,
            lambda carry: step(carry._replace(before=before))._replace(before=()),
            lambda carry: carry,
            carry._replace(before=()),
            axes=axes,
        )._replace(before=before)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which it and its base exchange."""
        return tuple(dict.fromkeys((*self.group.axes, *self.base.axes)))

    def outer_state(self, carry: Carry) -> Any:
        """Return the state with anchor and outer state: local where replicas have their own."""
        return carry.shared if self.exact_average else carry.local

    def weighted_params(
        self, carry: Carry, context: UpdateContext
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the weighted parameters and their weight, None if it is always 1."""
        x, weight = carry.params, context.weight
        mass: jax.Array | None = None
        mass_of = wrap_algorithm(self.base).mass
        pairs = None
        if mass_of is not None and not self.base.counts_alike:
            pairs = mass_of(carry.local)
        if pairs is not None:

            def weighted_sum(own: jax.Array, *others: jax.Array) -> jax.Array:
                terms = zip(pairs, (own, *others), strict=True)
                return sum(
                    (w.astype(own.dtype) * x.astype(own.dtype) for (w, _), x in terms),
                    start=jnp.zeros_like(own),
                )

            x = jax.tree.map(weighted_sum, x, *(tree for _, tree in pairs[1:]))
            mass = jnp.asarray(sum(w for w, _ in pairs))
        if weight is not None:
            x = jax.tree.map(lambda leaf: scale(leaf, weight), x)
            mass = weight if mass is None else scale(mass, weight)
        return x, mass

    def displacement_fn(
        self, mass: jax.Array | None, replicas: ReplicaGroup, context: UpdateContext
    ) -> DisplacementFn:
        """Return the function that makes D of weighted parameters and the anchor."""
        # sum x / sum w is the exact mean of weighted and push-sum parameters too.
        aggregate = self.aggregate
        if isinstance(aggregate, RadialDirectional):

            def combined_displacement(replicas: ReplicaGroup, x: PyTree, anchor: PyTree) -> PyTree:
                return aggregate.combine(local_displacement(x, mass, anchor), mass, replicas)

            return combined_displacement

        total = None if mass is None else replicas.mean_number(mass)

        def mean_of(leaf: jax.Array, old: jax.Array) -> jax.Array:
            if total is None:
                return leaf
            if context.weight is None and aggregate is None:
                return leaf / total.astype(leaf.dtype)
            # If all have run out of data, the anchor stays.
            return jnp.where(total > 0, quotient(leaf, total), old)

        def mean_displacement(replicas: ReplicaGroup, x: PyTree, anchor: PyTree) -> PyTree:
            mean = jax.tree.map(mean_of, replicas.reduce_scatter(x, role="slow"), anchor)
            return jax.tree.map(subtract, anchor, mean)

        return mean_displacement

    def weigh_by_norm(
        self,
        fragment: Fragment,
        x: PyTree,
        mass: jax.Array | None,
        replicas: ReplicaGroup,
        carry: Carry,
    ) -> tuple[PyTree, jax.Array | None]:
        """Return weighted parameters and their weight, less of a replica that moved too far."""
        if not isinstance(self.aggregate, NormWeighted):
            return x, mass
        v = local_displacement(x, mass, fragment.select(carry.shared["anchor"]))
        factor = self.aggregate.factor(v, mass, replicas)
        x = jax.tree.map(lambda leaf: scale(leaf, factor), x)
        return x, factor if mass is None else scale(mass, factor)

    def displacement_to_send(
        self,
        fragment: Fragment,
        x: PyTree,
        mass: jax.Array | None,
        replicas: ReplicaGroup,
        carry: Carry,
    ) -> tuple[PyTree, jax.Array | None]:
        """Return what this replica sends in a codec, and whether any has weight."""
        # Send D and not x: D is small, and a codec's error is proportional to it.
        sent = carry.local["sent"]
        start = fragment.select(sent.reference if self.is_sharded else carry.shared["anchor"])
        away = local_displacement(x, mass, start)
        return part_to_send(away, _select_residual(fragment, sent.residual), replicas, mass)

    def update_residual(
        self,
        fragment: Fragment,
        anyone: jax.Array | None,
        displacement: PyTree,
        lost: PyTree,
        carry: Carry,
        replicas: ReplicaGroup,
    ) -> tuple[PyTree, Carry]:
        """Return D, and the carry that remembers what of it was lost.

        Without weight on any replica D is 0, and what was not sent before stays; None: there is
        some.
        """
        sent = carry.local["sent"]
        residual = () if replicas.codec is None else next_residual(replicas.codec, lost)
        if anyone is not None:
            displacement = jax.tree.map(lambda x: jnp.where(anyone, x, 0), displacement)
        if has_leaves(residual):
            old = fragment.select(sent.residual)
            if anyone is not None:
                residual = jax.tree.map(functools.partial(jnp.where, anyone), residual, old)
            sent = sent._replace(residual=fragment.write(sent.residual, residual))
        return displacement, carry._replace(local=carry.local | {"sent": sent})

    def apply_outer_step(
        self,
        fragment: Fragment,
        values: PyTree,
        mass: jax.Array | None,
        rate: jax.Array | None,
        replicas: ReplicaGroup,
        context: UpdateContext,
        carry: Carry,
        displacement_fn: DisplacementFn | None = None,
    ) -> Carry:
        """Return the carry after the outer optimizer's step.

        D is `displacement_fn(replicas, values, anchor)`, of any leaves of weighted parameters;
        without it D are the values.
        """
        old = carry
        if carry.statistics and self.exact_average:
            means = replicas.plain.mean(carry.statistics, mass)
            carry = carry._replace(statistics=means)
        state, options = self.outer_state(carry), {}
        stepper, anchor = self.stepper(carry.before, fragment), fragment.select(state["anchor"])
        outer = fragment_state(state["outer"], fragment, stepper.init, state["anchor"])
        if self.rate is not None and rate is not None:
            outer, rate, carry = self.agree_on_rate(fragment, outer, rate, replicas, carry)
            options = {"learning_rate": rate}

        # Any optax optimizer, with D as its gradient; it runs on blocks of a sharded anchor.
        def step(displacement: PyTree, anchor: PyTree, outer: Any) -> tuple[PyTree, Any]:
            try:
                step, outer = stepper.update(displacement, outer, anchor, **options)
            except TypeError as error:
                error.add_note(
                    f"{self.owner}: `outer_optimizer` is given displacement, state and anchor; "
                    "there is no loss for one that needs `value`, `grad` or `value_fn`."
                )
                raise
            return jax.tree.map(add, anchor, step), outer

        # The anchor replaces the parameters. Adding a step to them instead would let the replicas
        # drift apart by rounding, a little with every slow step.
        if displacement_fn is None:
            anchor, outer = step(values, anchor, outer)
            whole, anchor, carry = self.gather_anchor(fragment, anchor, replicas, carry)
        else:
            run = slow_step
            if self.is_element_wise:
                run = functools.partial(slow_step_in_blocks, count=context.count)
            whole, anchor, outer = run(displacement_fn, step, replicas, values, anchor, outer)
        outer = with_state(state["outer"], fragment, outer, state["anchor"])
        new = {"anchor": fragment.write(state["anchor"], anchor), "outer": outer}
        carry = self.with_outer_state(carry, new)
        local = fragment.select(carry.params)
        target = merge_params(local, whole, self.merge)
        # Rounded as the parameters are: all replicas go on from one value.
        leaves = fragment.select(carry.before)
        target = widen_updates(jax.tree.map(lambda p, t: t.astype(p.dtype), leaves, target))
        carry = carry._replace(params=fragment.write(carry.params, target))

        def move(tree: PyTree) -> PyTree:
            local = fragment.select(tree)
            new = merge_params(local, whole, self.merge)
            return fragment.write(tree, jax.tree.map(lambda n, x: n.astype(x.dtype), new, local))

        if self.exact_average:
            # What the base still has under way moves alike.
            base, local = wrap_algorithm(self.base), carry.local
            local = local if base.move is None else base.move(local, move)
            local = base.reset(local) if self.replaces_base else local
            carry = carry._replace(local=local)
        return update_moments(old, carry, replicas, context, self.to_moments)

    def agree_on_rate(
        self,
        fragment: Fragment,
        outer: Any,
        rate: jax.Array,
        replicas: ReplicaGroup,
        carry: Carry,
    ) -> tuple[Any, jax.Array, Carry]:
        """Return outer state and rate, equal on all replicas, and the carry then.

        With different rates replicas would diverge, even if each keeps its own anchor.

        Communication: for rates that are passed one all-reduce of 8 bytes.
        """
        assert self.rate is not None
        if not self.rate.is_passed:
            return outer, rate, carry
        assert self.rate.observe is not None
        assert self.rate.last is not None
        rates, number = carry.local["rates"], fragment.number
        largest, since = replicas.plain.largest(
            jnp.stack([rate.astype(rates.dtype), rates[number]])
        )
        outer = self.rate.observe(outer, since)
        rate = jnp.where(largest == NO_RATE, self.rate.last(outer), largest)
        local = carry.local | {"rates": rates.at[number].set(0.0)}
        return outer, rate, carry._replace(local=local)

    def with_outer_state(self, carry: Carry, new: dict[str, Any]) -> Carry:
        """Return the carry with new values of anchor and outer state."""
        if self.exact_average:
            return carry._replace(shared=carry.shared | new)
        return carry._replace(local=carry.local | new)

    def gather_anchor(
        self, fragment: Fragment, anchor: PyTree, replicas: ReplicaGroup, carry: Carry
    ) -> tuple[PyTree, PyTree, Carry]:
        """Return where all replicas continue, the anchor, and the carry then."""
        leaves, codec = fragment.select(carry.before), replicas.codec
        if not self.exact_average:  # each replica has an anchor of its own
            return anchor, anchor, carry
        if codec is None or not self.is_sharded:
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

    def take(
        self, carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, number: int
    ) -> Carry:
        """Take what this fragment sends, unless the base refuses it."""
        fragment = self.known[number]
        replicas = _fragment_group(fragment, replicas, carry.before)
        allowed = jnp.asarray(True)
        if (permit := wrap_algorithm(self.base).permit) is not None:
            allowed, local = permit(carry, replace(replicas.plain, axis_name=self.axes))
            carry = carry._replace(local=local)
        x, mass = self.weighted_params(carry, context)
        # Weighted values and their weight, whose sums over replicas give the exact mean. The rate
        # goes with them: the displacement was made at it, however late it is applied. A codec sends
        # shares of a mean: all have weight, or none.
        values, mass = self.weigh_by_norm(fragment, fragment.select(x), mass, replicas, carry)
        if self.group.codec is not None:
            values, mass = self.displacement_to_send(fragment, values, mass, replicas, carry)
        old: InFlight = carry.local["in_flight"][number]
        one, rate = jnp.ones_like(old.mass), self.rate_of(context)
        taken = old._replace(
            values=jax.tree.map(lambda new, like: new.astype(like.dtype), values, old.values),
            mass=one if mass is None else mass.astype(one.dtype),
            rate=one if rate is None else rate.astype(one.dtype),
            parts=jnp.where(allowed, 0, NOTHING).astype(jnp.int32),
        )
        return _with_flight(carry, number, taken)

    def send(
        self, carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, number: int
    ) -> Carry:
        """Average the next part of what is in flight."""
        del context
        fragment = self.known[number]
        replicas = _fragment_group(fragment, replicas, carry.before)
        flight = average_part(carry.local["in_flight"][number], replicas, self.delay)
        return _with_flight(carry, number, flight)

    def apply_in_flight(
        self, carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, number: int
    ) -> Carry:
        """Make the slow step with what has arrived, if all of it has."""
        fragment = self.known[number]
        replicas = _fragment_group(fragment, replicas, carry.before)
        flight: InFlight = carry.local["in_flight"][number]
        average, has_weight = arrived_mean(flight, replicas)
        displacement = replicas.block(average)
        anchor = fragment.select(carry.shared["anchor"])
        if self.group.codec is None:
            displacement = jax.tree.map(subtract, anchor, displacement)
            displacement = jax.tree.map(lambda x: jnp.where(has_weight, x, 0), displacement)
            after = carry
        else:
            displacement, after = self.update_residual(
                fragment, has_weight, displacement, flight.residual, carry, replicas
            )
        _, mass = self.weighted_params(carry, context)
        rate = None if self.rate is None else flight.rate
        if self.rate is not None and not self.rate.is_passed:
            rate = replicas.plain.same(flight.rate)
        after = self.apply_outer_step(fragment, displacement, mass, rate, replicas, context, after)
        is_whole = replicas.plain.same(flight.parts) == self.delay
        # No conditional, beside which nothing would run: the slow step itself sends little.
        after = jax.tree.map(lambda new, old: jnp.where(is_whole, new, old), after[1:], carry[1:])
        carry = Carry(carry.before, *after)
        return _with_flight(carry, number, flight.drop())


def local_displacement(x: PyTree, mass: jax.Array | None, anchor: PyTree) -> PyTree:
    """Return how far a replica is from the anchor, sign reversed, of its weighted parameters."""
    z = x if mass is None else jax.tree.map(lambda leaf: quotient(leaf, mass), x)
    return jax.tree.map(subtract, anchor, z)


def merge_params(local: PyTree, anchor: PyTree, merge: float) -> PyTree:
    """Return `anchor + merge * (local - anchor)`: the anchor for 0, the local values for 1."""
    if merge == 0:
        return anchor
    if merge == 1:
        return jax.tree.map(lambda x, a: x.astype(a.dtype), local, anchor)
    return jax.tree.map(lambda x, a: a + merge * (x.astype(a.dtype) - a), local, anchor)


def _fragment_group(fragment: Fragment, replicas: ReplicaGroup, params: PyTree) -> ReplicaGroup:
    """Return the group for the leaves of a fragment, of which it knows the layouts."""
    return replicas.for_leaves(params, fragment.places, fragment.unflatten)


def _select_residual(fragment: Fragment, residual: PyTree) -> PyTree:
    """Return the fragment's part of a tree, () of none."""
    return fragment.select(residual) if has_leaves(residual) else ()


def _wrap_shared_state(event: Event) -> Event:
    """Return an event of the base, whose shared state is the "base" of the whole."""

    def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext) -> Carry:
        inner = event.run(carry._replace(shared=carry.shared["base"]), replicas, context)
        return inner._replace(shared=carry.shared | {"base": inner.shared})

    return replace(event, run=run)


def _with_flight(carry: Carry, number: int, flight: InFlight) -> Carry:
    flights = with_flight(carry.local["in_flight"], number, flight)
    return carry._replace(local=carry.local | {"in_flight": flights})


def _drop_in_flight(local: Any, due: Any, *, number: int) -> Any:
    """Drop what is in flight: of a displacement of which a part was not sent is no mean."""
    flights = local["in_flight"]
    flight = flights[number].drop(due)
    return local | {"in_flight": with_flight(flights, number, flight)}


def shards_state(
    owner: str,
    shard_state: bool | None,
    group: ReplicaGroup,
    *,
    exact_average: bool = True,
    is_element_wise: bool = True,
) -> bool | None:
    """Return whether anchor and outer state are sharded, for the argument `shard_state`.

    None: in a training step, and not in a loop of one's own.

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
