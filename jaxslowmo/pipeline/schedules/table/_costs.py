"""What operations cost: one number, or one per stage."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._rows import Kind, Operation

Costs = float | Sequence[float]
"""One number, the time of a whole device stage; one per device stage; or one per model stage."""


class CostTable(NamedTuple):
    """Times of F, B and W per stage of the model."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def of(self, operation: Operation, model_stage: int) -> float:
        """The time of `operation`; "BW" costs B and W together."""
        return self.of_kind(operation.kind, model_stage)

    def of_kind(self, kind: Kind, model_stage: int) -> float:
        """The time of one operation of `kind` on a stage of the model."""
        if kind == "F":
            return self.forward[model_stage]
        if kind == "B":
            return self.backward_input[model_stage]
        if kind == "W":
            return self.backward_weight[model_stage]
        return self.backward_input[model_stage] + self.backward_weight[model_stage]


def cost_table(
    placement: tuple[int, ...],
    num_stages: int,
    *,
    forward: Costs,
    backward_input: Costs,
    backward_weight: Costs,
) -> CostTable:
    """Times per stage of the model; raises unless they are finite, none negative and not all 0."""
    table = CostTable(
        _per_model_stage("forward", forward, placement, num_stages),
        _per_model_stage("backward_input", backward_input, placement, num_stages),
        _per_model_stage("backward_weight", backward_weight, placement, num_stages),
    )
    if not any(map(sum, table)):
        raise ValueError("`forward`, `backward_input` and `backward_weight` must not all be 0.")
    return table


def as_time(argument: str, value: object) -> float:
    """`value` as a float; raises unless it is a finite number >= 0."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        time = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        time = math.nan
    if not (math.isfinite(time) and time >= 0):
        raise ValueError(f"`{argument}` must be a finite time >= 0, got {value!r}.")
    return time


def _per_model_stage(
    argument: str, value: Costs, placement: tuple[int, ...], num_stages: int
) -> tuple[float, ...]:
    num_chunks = len(placement) // num_stages
    if np.ndim(value) == 0:
        return (as_time(argument, value) / num_chunks,) * len(placement)
    times = [as_time(argument, one) for one in value]  # pyright: ignore[reportGeneralTypeIssues]
    if len(times) == len(placement):
        return tuple(times)
    if len(times) == num_stages:
        return tuple(times[stage] / num_chunks for stage in placement)
    raise ValueError(
        f"`{argument}` must be one time, one per device stage ({num_stages}) or one per stage of "
        f"the model ({len(placement)}), got {len(times)} of them."
    )
