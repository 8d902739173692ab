"""LocalSGD: average the parameters every few updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._typing import AxisName, Phase, PyTree
from ..tree import check_floating, widen_updates
from ._averaging import mean_of_others, updates_to_mean
from ._builder import parameter_transform
from ._checks import check_exchange_arguments
from ._due import Communicate, increment, is_due, phase_scope, run_if
from ._protocol import Others, ParameterTransform
from ._schedule import Every, as_schedule

AVERAGE = "average"


class LocalSGDState(NamedTuple):
    """State of `local_sgd`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas


def local_sgd(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 3,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
) -> ParameterTransform:
    """Average the parameters over replicas every `sync_every` updates; train alone between.

    Comes last in a chain, after the optimizer: when due, params = mean over `axis_name` of
    y = params + updates; else params = y. Optimizer state stays local.

    Args:
      axis_name: mapped axis of the replicas.
      sync_every: period k (due when t % k == 0, t = 1, 2, ...) or `js.every(...)`.
      local_axis_name: axis of the devices inside a replica, which hold equal parameters: each then
        exchanges 1/L of them.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica, for leaves that are sharded there; each device exchanges its own block.
      bucket_bytes: None exchanges one buffer per dtype, else buffers that close at this size.

    Returns:
      A `ParameterTransform` with state `LocalSGDState`. `update` needs `params`; updates of
      half-precision leaves come back as float32.

    Raises:
      ValueError: `sync_every` < 1 or negative `bucket_bytes`, at construction; at trace time an
        unbound axis, missing params, non-float leaves (named).
      UserWarning: once, if the axis has size 1.

    Communication: in a due update one all-reduce over `axis_name` per dtype buffer, N bytes
      together, N the bytes of the parameters in their own dtypes; nothing in others. With
      `local_axis_name` N / L bytes per device, and one all-gather of N over that axis. With a
      weight 8 bytes more, in an all-reduce before.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
    """
    owner = "local_sgd"
    check_exchange_arguments(owner, axis_name, local_axis_name, bucket_bytes)
    schedule = as_schedule(sync_every)

    def phase_of(t: int, skipped: int = 0) -> Phase:
        del skipped  # it counts updates
        return (AVERAGE,) if schedule(t) else ()

    def init_fn(params: PyTree) -> LocalSGDState:
        check_floating(owner, params)
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

        def averaged(operand: tuple[PyTree, Others]) -> tuple[PyTree, Others]:
            u, o = operand
            with phase_scope(AVERAGE):
                mean = updates_to_mean(
                    params,
                    u,
                    axis_name,
                    local_axis_name=local_axis_name,
                    bucket_bytes=bucket_bytes,
                    param_specs=param_specs,
                    weight=weight,
                )
                return mean, mean_of_others(o, axis_name, weight)

        def alone(operand: tuple[PyTree, Others]) -> tuple[PyTree, Others]:
            u, o = operand
            return widen_updates(u), o

        due = is_due(AVERAGE, schedule, count, communicate, phase)
        return *run_if(due, averaged, alone, (updates, others)), LocalSGDState(count)

    def with_specs(specs: PyTree) -> ParameterTransform:
        if param_specs is not None:
            return transform
        return local_sgd(
            axis_name,
            sync_every=schedule,
            local_axis_name=local_axis_name,
            param_specs=specs,
            bucket_bytes=bucket_bytes,
        )

    transform = parameter_transform(
        owner,
        (axis_name,),
        init=init_fn,
        exchange=exchange,
        events=(AVERAGE,),
        local_axis_name=local_axis_name,
        phase=phase_of,
        due=schedule,
        schedules=(schedule,),
        with_specs=with_specs,
    )
    return transform
