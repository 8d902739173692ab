"""An outer optimizer over what the replicas have done since the last slow step.

SlowMo and DiLoCo are this machinery with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._typing import AxisName, Phase, PyTree
from ..collectives import all_mean, quotient, scaled
from ..mesh import axis_names, require_axes
from ..tree import (
    added,
    apply_exactly,
    check_floating,
    landing,
    subtracted,
    updates_to,
    widen_updates,
)
from ._anchor import AnchorLayout
from ._averaging import mean_of_others
from ._builder import inside, parameter_transform
from ._carry import Carried, Placement, carry_leaf
from ._due import Communicate, decide, either, increment, is_due, phase_scope, run_if
from ._protocol import Others, ParameterTransform
from ._schedule import Every

SLOW = "slow"


class OuterState(NamedTuple):
    """State of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one


Operand = tuple[PyTree, Others, OuterState]  # updates, what travels along, state


def outer_transform(
    owner: str,
    axis_name: AxisName,
    *,
    base: ParameterTransform | None,
    schedule: Every,
    outer_optimizer: optax.GradientTransformation,
    layout_for: Callable[[PyTree | None], AnchorLayout],
    param_specs: PyTree | None,
    exact_average: bool,
    local_axis_name: AxisName | None,
    learning_rate: optax.Schedule | None = None,
    observe: Callable[[Any, jax.Array], Any] = lambda outer, rate: outer,
) -> ParameterTransform:
    """Assemble the parameter transform; arguments are checked by its callers.

    When due: D = anchor - average, one step of `outer_optimizer` on the anchor with gradient D, and
    params = anchor. With an exact average the base's own exchange is skipped in that update. With a
    `learning_rate` that step is given its value, and `observe(outer, rate)` the one of each update.
    """
    build = functools.partial(
        outer_transform,
        owner,
        axis_name,
        schedule=schedule,
        outer_optimizer=outer_optimizer,
        layout_for=layout_for,
        exact_average=exact_average,
        local_axis_name=local_axis_name,
        learning_rate=learning_rate,
        observe=observe,
    )
    layout = layout_for(param_specs)
    outer_optimizer = optax.with_extra_args_support(outer_optimizer)

    def base_phase(phase: Phase | None) -> Phase | None:
        return None if phase is None else tuple(e for e in phase if e != SLOW)

    def phase_of(t: int, skipped: int = 0) -> Phase:
        slow = bool(schedule(t))
        if base is None or (slow and exact_average):
            own = ()
        else:
            own = base.phase(t, skipped + (schedule.times(t - 1) if exact_average else 0))
        return (*own, SLOW) if slow else own

    def due(t: Any) -> Any:
        return schedule(t) if base is None else either(base.due(t), schedule(t))

    base_skipped = None if base is None else base.skipped

    def skipped(state: OuterState) -> Any:
        assert base_skipped is not None
        slow = schedule.times(int(state.count)) if exact_average else 0
        return base_skipped(state.base) - slow

    def sized(axis_sizes: Mapping[str, int]) -> ParameterTransform:
        return build(base=None if base is None else base.sized(axis_sizes), param_specs=param_specs)

    def with_specs(specs: PyTree) -> ParameterTransform:
        # The layout of shards is part of the state: only specs that were given decide it.
        own = specs if param_specs is None and not layout.is_sharded else param_specs
        return build(base=None if base is None else base.with_specs(specs), param_specs=own)

    def init_fn(params: PyTree) -> OuterState:
        check_floating(owner, params)
        if layout.is_sharded:  # others can be initialised outside of the axis
            require_axes(owner, "axis_name", axis_name)
            if local_axis_name is not None:
                require_axes(owner, "local_axis_name", local_axis_name)
        return of_anchor(layout.store(params), params)

    def of_anchor(anchor: PyTree, params: PyTree) -> OuterState:
        return OuterState(
            count=jnp.zeros([], jnp.int32),
            anchor=anchor,
            outer=layout.pin(outer_optimizer.init(anchor), params),
            base=() if base is None else base.init(params),
        )

    def exchange(
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
        rate: dict[str, Any] = {}
        if learning_rate is not None:
            gamma = jnp.asarray(learning_rate(state.count))
            rate["learning_rate"] = gamma
            state = state._replace(outer=observe(state.outer, gamma))
        state = state._replace(count=increment(state.count))

        def step_base(operand: Operand, talk: Communicate) -> Operand:
            u, o, s = operand
            if base is None:
                return widen_updates(u), o, s
            with inside(own_axes):
                u, o, base_state = base.exchange(
                    u,
                    o,
                    s.base,
                    params,
                    communicate=talk,
                    weight=weight,
                    phase=base_phase(phase),
                    **extra,
                )
            return u, o, s._replace(base=base_state)

        def mass_of(y: PyTree, base_state: PyTree) -> tuple[PyTree, jax.Array | None]:
            """The weighted parameters of this replica, and their weight; None where all weigh 1."""
            x, mass = (y, None) if base is None else base.numerator(base_state, y)
            if weight is None:
                return x, mass
            share = weight  # for the type checker, which forgets that it is one
            x = jax.tree.map(lambda leaf: scaled(leaf, share), x)
            return x, share if mass is None else scaled(mass, share)

        def mean_of(x: PyTree, mass: jax.Array | None, anchor: PyTree) -> PyTree:
            """What the replicas' weighted parameters amount to, in the anchor's form."""
            average = layout.average(x)
            if mass is None:
                return average
            total = all_mean(mass, axis_name)
            if weight is None:
                return jax.tree.map(lambda leaf: leaf / total.astype(leaf.dtype), average)
            # Where all replicas have run out, the anchor stays.
            return jax.tree.map(
                lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, anchor
            )

        def outer_step(operand: Operand) -> Operand:
            u, o, s = operand
            y, base_state = landing(params, u), s.base
            if exact_average:
                x, mass = mass_of(y, base_state)
                average = mean_of(x, mass, s.anchor)
                o = mean_of_others(o, axis_name, mass)
                if base is not None:
                    base_state = base.reset(base_state)
            else:
                average = layout.average(y)
            displacement = jax.tree.map(subtracted, s.anchor, average)
            step, outer = outer_optimizer.update(displacement, s.outer, s.anchor, **rate)
            anchor = jax.tree.map(added, s.anchor, step)
            target = layout.restore(anchor, params)
            rounded = jax.tree.map(lambda p, t: t.astype(p.dtype), params, target)
            moved = OuterState(s.count, anchor, outer, base_state)
            return updates_to(params, rounded), o, moved

        def slow_step(operand: Operand) -> Operand:
            if not exact_average:
                with phase_scope(SLOW):
                    return outer_step(operand)
            u, o, s = step_base(operand, False)  # it only counts on: its exchange would be wasted
            with phase_scope(SLOW):
                if ask_base is None:
                    return outer_step((u, o, s))
                allowed, s = permit(s, apply_exactly(params, u), o, all_axes)
                return run_if(allowed, outer_step, lambda operand: operand, (u, o, s))

        def any_step(operand: Operand) -> Operand:
            slow_due = is_due(SLOW, schedule, state.count, communicate, phase)
            if exact_average:
                return run_if(slow_due, slow_step, lambda o: step_base(o, communicate), operand)
            return run_if(slow_due, slow_step, lambda o: o, step_base(operand, communicate))

        # One conditional around all, so that a local step passes its updates through only one.
        any_due = decide(due(state.count) if phase is None else bool(phase), communicate)
        operand = updates, others, state
        return run_if(any_due, any_step, lambda o: step_base(o, False), operand)

    ask_base = None if base is None else base.permit

    def permit(
        state: OuterState, y: PyTree, others: Others, axes: Sequence[str]
    ) -> tuple[Any, OuterState]:
        assert ask_base is not None
        allowed, base_state = ask_base(state.base, y, others, axes)
        return allowed, state._replace(base=base_state)

    def carry(state: OuterState, params: PyTree, old: Placement, new: Placement) -> Carried:
        moved = functools.partial(_moved, layout, state.anchor, params=params, old=old, new=new)
        carried = Carried(()) if base is None else base.carry(state.base, params, old, new)
        fresh = OuterState(
            count=carry_leaf(state.count, old, new),
            anchor=moved(state.anchor),
            outer=moved(state.outer),
            base=carried.state,
        )
        note = (
            "Each replica had an anchor and slow momentum of its own (`exact_average=False`): they "
            "were averaged."
            if layout.is_own
            else "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
        )
        return Carried(fresh, (note, *carried.notes))

    own_axes = axis_names(axis_name)
    base_axes = () if base is None else base.axes
    all_axes = tuple(dict.fromkeys((*own_axes, *base_axes)))
    return parameter_transform(
        owner,
        (axis_name,),
        init=init_fn,
        like_init=lambda params: of_anchor(layout.like_stored(params), params),
        exchange=exchange,
        events=(SLOW,) if base is None else None,  # a base checks its own part of the phase
        local_axis_name=local_axis_name,
        inner_axes=base_axes,
        phase=phase_of,
        skipped=None if base_skipped is None else skipped,
        due=due,
        schedules=(schedule, *(base.schedules if base is not None else ())),
        permit=None if ask_base is None else permit,
        anchor=lambda state, params: layout.restore(state.anchor, params),
        sized=sized,
        with_specs=with_specs,
        shards_whole_leaves=layout.is_sharded and param_specs is None,
        carry=carry,
        shares=None if base is None else lambda state: base.shares(state.base),
    )


def _moved(
    layout: AnchorLayout,
    anchor: PyTree,
    tree: PyTree,
    *,
    params: PyTree,
    old: Placement,
    new: Placement,
) -> PyTree:
    """`tree` with what has the form of the anchor joined and split again."""
    if layout.is_own and old.replicas == new.replicas:
        return tree
    form = jax.tree.structure(anchor), [np.shape(x) for x in jax.tree.leaves(anchor)]

    def is_like_anchor(x: PyTree) -> bool:
        leaves, structure = jax.tree.flatten(x)
        return (structure, [np.shape(leaf) for leaf in leaves]) == form

    def move(x: PyTree) -> PyTree:
        if is_like_anchor(x):
            return layout.split(layout.join(x, params, old), params, new)
        return carry_leaf(x, old, new)

    return jax.tree.map(move, tree, is_leaf=is_like_anchor)
