"""Simulate how long a table takes: each stage as soon as it can, or all stages in lockstep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._operations import Done, Kind, Operation, PlacedOperation, Tick

Costs = float | Sequence[float]
"""One number, the time of a whole device stage; one per device stage; or one per model stage."""


class CostTable(NamedTuple):
    """The times of F, B and W, one for each stage of the model."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def time(self, kind: Kind, model_stage: int) -> float:
        """Return the time of an operation of `kind` on a stage of the model; BW takes B + W."""
        times = {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}
        return sum(times[part][model_stage] for part in kind)


def cost_table(placement: tuple[int, ...], num_stages: int, **times: Costs) -> CostTable:
    """Return the times of each stage of the model.

    Args:
      placement: the device stage of each stage of the model.
      num_stages: number of device stages.
      **times: the fields of `CostTable`, each in a form that `Costs` allows.

    Raises:
      ValueError: times that are not finite, or negative, or all 0.
    """
    table = CostTable(
        **{name: _per_model_stage(name, x, placement, num_stages) for name, x in times.items()}
    )
    if not any(map(sum, table)):
        raise ValueError("`forward`, `backward_input` and `backward_weight` must not all be 0.")
    return table


def as_time(argument: str, value: object) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a finite number >= 0."""
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


class TimedOperation(NamedTuple):
    """An operation with its start and end times."""

    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of simulating one step of a schedule.

    Attributes:
      time: time from the first start to the last end of any stage.
      bubble: idle share of the devices' time, `1 - m (F + B + W) / cost` for m microbatches. If
        stages run freely, `cost` is the longest span of a stage from its first start to its last
        end; in lockstep it is the whole time. Where stages differ, F + B + W is their mean.
      stash: the most microbatches of a chunk that each device stage holds at once.
      sends: the number of messages that each device stage sends to other stages.
      timeline: the operations of each device stage, with start and end.
    """

    time: float
    bubble: float
    stash: tuple[int, ...]
    sends: tuple[int, ...]
    timeline: tuple[tuple[TimedOperation, ...], ...]


def simulate_free(
    order: Sequence[PlacedOperation], placement: Sequence[int], costs: CostTable, send: float
) -> list[list[TimedOperation]]:
    """Return each stage's operations with times, if each starts once its inputs have arrived."""
    lines: list[list[TimedOperation]] = [[] for _ in range(1 + max(placement))]
    end: dict[Done, float] = {}
    for operation, model_stage, gives, needs in order:
        line = lines[operation.stage]
        start = line[-1].end if line else 0.0
        for needed in needs:
            elsewhere = placement[needed.model_stage] != operation.stage
            start = max(start, end[needed] + send * elsewhere)
        end[gives] = start + costs.time(operation.kind, model_stage)
        line.append(TimedOperation(operation, start, end[gives]))
    return lines


def simulate_lockstep(
    ticks: Sequence[Tick], model_stages: Sequence[Sequence[int]], costs: CostTable, send: float
) -> tuple[list[list[TimedOperation]], float]:
    """Return each stage's operations with times in lockstep, and the end of the last tick.

    All stages start a tick together. It lasts as long as the slowest of them, plus `send`.
    """
    lines: list[list[TimedOperation]] = [[] for _ in model_stages]
    now = 0.0
    for tick in ticks:
        ends = [now]
        for stage, operations in enumerate(tick):
            start = now
            for operation in operations:
                done = start + costs.time(operation.kind, model_stages[stage][operation.chunk])
                lines[stage].append(TimedOperation(operation, start, done))
                start = done
            ends.append(start)
        now = max(ends) + send
    return lines, now
