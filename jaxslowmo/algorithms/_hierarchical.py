"""LocalSGD on several levels: near replicas often, all of them rarely."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import AxisName, Phase, PyTree
from ..mesh import axis_names
from ..tree import check_floating, widen_updates
from ._averaging import mean_of_others, updates_to_mean
from ._builder import parameter_transform
from ._checks import check_exchange_arguments
from ._due import Communicate, decide, increment, phase_scope, run_if, run_one_of
from ._local_sgd import LocalSGDState
from ._protocol import Others, ParameterTransform
from ._schedule import Every, as_schedule

_OWNER = "hierarchical_local_sgd"


def hierarchical_local_sgd(
    sync_every: Mapping[AxisName, int | Every],
    *,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
) -> ParameterTransform:
    """Average the parameters over nested groups of replicas, larger groups more rarely.

    Comes last in a chain, after the optimizer. In every update the largest group that is due
    averages y = params + updates; the smaller ones inside it would find nothing left to do.

        js.hierarchical_local_sgd({"device": 2, ("node", "device"): 16})

    Args:
      sync_every: for each group, named by its mapped axes, the period or `js.every(...)`. Groups
        are nested: a longer period has all axes of a shorter one and more.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica; see `local_sgd`.
      bucket_bytes: None exchanges one buffer per dtype, else buffers that close at this size.

    Returns:
      A `ParameterTransform` with state `LocalSGDState`; a `weight` holds in every group.

    Raises:
      ValueError: no group, a period < 1, groups that are not nested, periods that do not grow with
        them, negative `bucket_bytes`, at construction; at trace time an unbound axis, missing
        params, non-float leaves.
      UserWarning: once, if an axis has size 1.

    Communication: in a due update one all-reduce per dtype buffer over the axes of the largest due
      group, N bytes together, N the bytes of the parameters; nothing in others.

    Source: torch 2.13, `HierarchicalModelAverager`, which counts from 0: its
      {k: group} with `warmup_steps=w` is `js.every(k, start=w, offset=1 - w)` for the group's axes.
    """
    levels = _nested(sync_every)
    for axes, _ in levels:
        check_exchange_arguments(_OWNER, axes, None, bucket_bytes)
    events = tuple(f"average {','.join(axis_names(axes))}" for axes, _ in levels)

    def phase_of(t: int, skipped: int = 0) -> Phase:
        del skipped  # it counts updates
        due = [event for event, (_, schedule) in zip(events, levels, strict=True) if schedule(t)]
        return tuple(due[-1:])

    def due(t: Any) -> Any:
        any_due = False
        for _, schedule in levels:
            any_due = schedule(t) | any_due
        return any_due

    def init_fn(params: PyTree) -> LocalSGDState:
        check_floating(_OWNER, params)
        return LocalSGDState(jnp.zeros([], jnp.int32))

    def exchange(
        updates: PyTree,
        others: Others,
        state: LocalSGDState,
        params: PyTree,
        *,
        communicate: Communicate,
        weight: jax.Array | None,
        phase: Phase | None,
        **extra: Any,
    ) -> tuple[PyTree, Others, LocalSGDState]:
        del extra
        count = increment(state.count)

        def average(level: int):
            axes = levels[level][0]

            def over_group(operand: tuple[PyTree, Others]) -> tuple[PyTree, Others]:
                u, o = operand
                with phase_scope(events[level]):
                    mean = updates_to_mean(
                        params,
                        u,
                        axes,
                        bucket_bytes=bucket_bytes,
                        param_specs=param_specs,
                        weight=weight,
                    )
                    return mean, mean_of_others(o, axes, weight)

            return over_group

        if phase is None:
            index: int | jax.Array = jnp.zeros([], jnp.int32)
            for i, (_, schedule) in enumerate(levels):
                index = jnp.where(schedule(count), i, index)
            is_due = due(count)
        else:
            index = events.index(phase[0]) if phase else 0
            is_due = bool(phase)

        def averaged(operand: tuple[PyTree, Others]) -> tuple[PyTree, Others]:
            return run_one_of(index, [average(i) for i in range(len(levels))], operand)

        def alone(operand: tuple[PyTree, Others]) -> tuple[PyTree, Others]:
            u, o = operand
            return widen_updates(u), o

        moved = run_if(decide(is_due, communicate), averaged, alone, (updates, others))
        return *moved, LocalSGDState(count)

    def with_specs(specs: PyTree) -> ParameterTransform:
        if param_specs is not None:
            return transform
        return hierarchical_local_sgd(sync_every, param_specs=specs, bucket_bytes=bucket_bytes)

    transform = parameter_transform(
        _OWNER,
        tuple(axes for axes, _ in levels),
        init=init_fn,
        exchange=exchange,
        events=events,
        phase=phase_of,
        due=due,
        schedules=tuple(schedule for _, schedule in levels),
        with_specs=with_specs,
    )
    return transform


def _nested(sync_every: Mapping[AxisName, int | Every]) -> list[tuple[AxisName, Every]]:
    """The groups with their schedules, smallest first."""
    if not isinstance(sync_every, Mapping) or not sync_every:
        raise ValueError(
            f"{_OWNER}: `sync_every` must map the axes of each group to a period, such as "
            f'{{"device": 2, ("node", "device"): 16}}, got {sync_every!r}.'
        )
    levels = [(axes, as_schedule(period)) for axes, period in sync_every.items()]
    levels.sort(key=lambda level: len(axis_names(level[0])))
    for (inner, often), (outer, rarely) in itertools.pairwise(levels):
        if not set(axis_names(inner)) < set(axis_names(outer)):
            raise ValueError(
                f"{_OWNER}: `sync_every` must name nested groups, the larger one with all axes of "
                f"the smaller, got {inner!r} and {outer!r}."
            )
        if often.k >= rarely.k:
            raise ValueError(
                f"{_OWNER}: `sync_every` must be longer for the larger group, got {often.k} for "
                f"{inner!r} and {rarely.k} for {outer!r}."
            )
    return levels
