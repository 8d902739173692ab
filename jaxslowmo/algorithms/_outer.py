"""An outer optimizer over what the replicas have done since the last slow step.

SlowMo and DiLoCo are this machinery with different outer optimizers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._typing import AxisName, Phase, PyTree
from ..collectives import all_mean, quotient, scaled
from ..mesh import require_axes
from ..tree import check_floating, landing, updates_to, widen_updates
from ._anchor import AnchorLayout
from ._base import (
    Communicate,
    ParameterTransform,
    base_over,
    check_axes,
    check_update_arguments,
    check_weight,
    decide,
    either,
    increment,
    is_due,
    phase_scope,
    run_if,
    unless_idle,
)
from ._carry import Carried, Placement, carry_leaf
from ._schedule import Every

SLOW = "slow"


class OuterState(NamedTuple):
    """State of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one


def outer_transform(
    owner: str,
    axis_name: AxisName,
    *,
    base: ParameterTransform | None,
    schedule: Every,
    outer_optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    layout: AnchorLayout,
    exact_average: bool,
    local_axis_name: AxisName | None,
    warn: Callable[[str], None],
) -> ParameterTransform:
    """Assemble the parameter transform; arguments are checked by its callers.

    When due: D = anchor - average, one step of `outer_optimizer` on the anchor with gradient D, and
    params = anchor. With an exact average the base's own exchange is skipped in that update.
    """
    build = functools.partial(
        outer_transform,
        owner,
        axis_name,
        schedule=schedule,
        outer_optimizer=outer_optimizer,
        learning_rate=learning_rate,
        layout=layout,
        exact_average=exact_average,
        local_axis_name=local_axis_name,
        warn=warn,
    )
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

    def sized(axis_sizes: Mapping[str, int]) -> ParameterTransform:
        return build(base=None if base is None else base.sized(axis_sizes))

    def init_fn(params: PyTree) -> OuterState:
        check_floating(owner, params)
        if layout.is_sharded:  # others can be initialised outside of the axis
            require_axes(owner, "axis_name", axis_name)
            if local_axis_name is not None:
                require_axes(owner, "local_axis_name", local_axis_name)
        anchor = layout.store(params)
        return OuterState(
            count=jnp.zeros([], jnp.int32),
            anchor=anchor,
            outer=layout.pin(outer_optimizer.init(anchor), params),
            base=() if base is None else base.init(params),
        )

    def update_fn(
        updates: PyTree,
        state: OuterState,
        params: PyTree | None = None,
        *,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        **extra: Any,
    ) -> tuple[PyTree, OuterState]:
        events = (SLOW,) if base is None else None  # a base checks its own part of the phase
        check_update_arguments(owner, params, phase, events)
        check_floating(owner, params)
        check_axes(owner, axis_name, local_axis_name, warn)
        share = check_weight(owner, weight)
        updates = unless_idle(updates, share)
        count = increment(state.count)
        gamma = learning_rate(state.count)

        def step_base(updates: PyTree, base_state: PyTree, talk: Communicate):
            if base is None:
                return widen_updates(updates), base_state
            with base_over(axis_name):
                return base.update(
                    updates,
                    base_state,
                    params,
                    communicate=talk,
                    weight=share,
                    phase=base_phase(phase),
                    **extra,
                )

        def mean_of(y: PyTree, base_state: PyTree, anchor: PyTree) -> PyTree:
            """What the replicas' parameters y amount to, in the anchor's form."""
            if not exact_average:
                return layout.average(y)
            x, mass = (y, None) if base is None else base.numerator(base_state, y)
            if share is not None:
                alive = share  # for the type checker, which forgets that it is one
                x = jax.tree.map(lambda leaf: scaled(leaf, alive), x)
                mass = share if mass is None else scaled(mass, share)
            average = layout.average(x)
            if mass is None:
                return average
            total = all_mean(mass, axis_name)
            if share is None:
                return jax.tree.map(lambda leaf: leaf / total, average)
            # Where all replicas have run out, the anchor stays.
            return jax.tree.map(
                lambda leaf, old: jnp.where(total > 0, quotient(leaf, total), old), average, anchor
            )

        def slow_step(operand: tuple[PyTree, OuterState]) -> tuple[PyTree, OuterState]:
            u, s = operand
            base_state = s.base
            if exact_average:  # the base only counts on: its exchange would be wasted
                u, base_state = step_base(u, base_state, False)
            with phase_scope(SLOW):
                average = mean_of(landing(params, u), base_state, s.anchor)
                displacement = jax.tree.map(jnp.subtract, s.anchor, average)
                step, outer = outer_optimizer.update(
                    displacement, s.outer, s.anchor, learning_rate=gamma
                )
                anchor = jax.tree.map(jnp.add, s.anchor, step)
                target = layout.restore(anchor, params)
                rounded = jax.tree.map(lambda p, t: t.astype(p.dtype), params, target)
                if base is not None and exact_average:
                    base_state = base.reset(base_state)
                return updates_to(params, rounded), OuterState(count, anchor, outer, base_state)

        def base_step(
            operand: tuple[PyTree, OuterState], talk: Communicate
        ) -> tuple[PyTree, OuterState]:
            u, s = operand
            u, base_state = step_base(u, s.base, talk)
            return u, s._replace(count=count, base=base_state)

        def exchange(operand: tuple[PyTree, OuterState]) -> tuple[PyTree, OuterState]:
            slow_due = is_due(SLOW, schedule, count, communicate, phase)
            if exact_average:
                return run_if(slow_due, slow_step, lambda o: base_step(o, communicate), operand)
            return run_if(slow_due, slow_step, lambda o: o, base_step(operand, communicate))

        # One conditional around all, so that a local step passes its updates through only one.
        any_due = decide(due(count) if phase is None else bool(phase), communicate)
        return run_if(any_due, exchange, lambda o: base_step(o, False), (updates, state))

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

    schedules = (schedule, *(base.schedules if base is not None else ()))
    return ParameterTransform(
        init_fn,
        update_fn,
        phase=phase_of,
        due=due,
        schedules=schedules,
        anchor=lambda state, params: layout.restore(state.anchor, params),
        sized=sized,
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
