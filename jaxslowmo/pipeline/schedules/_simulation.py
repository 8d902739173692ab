"""How long a table takes: each stage as soon as it can, or all of them in lockstep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._operations import Done, Kind, Operation, PlacedOperation, Tick

Costs = float | Sequence[float]
"""One number, the time of a whole device stage; one per device stage; or one per model stage."""


class CostTable(NamedTuple):
    """Times of F, B and W per stage of the model."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def of(self, kind: Kind, model_stage: int) -> float:
        """The time of one operation of `kind` on a stage of the model; BW is B and W together."""
        times = {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}
        return sum(times[part][model_stage] for part in kind)


def cost_table(placement: tuple[int, ...], num_stages: int, **times: Costs) -> CostTable:
    """Return times per stage of the model, of `times` by the names of `CostTable`.

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


class Timed(NamedTuple):
    """An operation with its start and its end."""

    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One step of a schedule under given times.

    Attributes:
      time: from the first start to the last end of any stage.
      bubble: share of the devices' time that is idle, `1 - m (F + B + W) / cost` for m
        microbatches. `cost` is free-running the longest own span of a stage, from its first start
        to its last end, and in lockstep the whole time. Where stages differ, their mean counts.
      stash: per device stage, the most microbatches of a chunk that it holds at once.
      sends: per device stage, the messages that it sends to another one.
      timeline: per device stage its operations with start and end.
    """

    time: float
    bubble: float
    stash: tuple[int, ...]
    sends: tuple[int, ...]
    timeline: tuple[tuple[Timed, ...], ...]


def free_running(
    order: Sequence[PlacedOperation], placement: Sequence[int], costs: CostTable, send: float
) -> list[list[Timed]]:
    """Return when each device stage does what, if all start once they are free and have all."""
    lines: list[list[Timed]] = [[] for _ in range(1 + max(placement))]
    end: dict[Done, float] = {}
    for operation, model_stage, gives, needs in order:
        line = lines[operation.stage]
        start = line[-1].end if line else 0.0
        for needed in needs:
            elsewhere = placement[needed.model_stage] != operation.stage
            start = max(start, end[needed] + send * elsewhere)
        end[gives] = start + costs.of(operation.kind, model_stage)
        line.append(Timed(operation, start, end[gives]))
    return lines


def in_lockstep(
    ticks: Sequence[Tick], model_stages: Sequence[Sequence[int]], costs: CostTable, send: float
) -> tuple[list[list[Timed]], float]:
    """Return when each device stage does what, and the end of the last tick.

    All start a tick together, which lasts as long as the longest of them and `send`.
    """
    lines: list[list[Timed]] = [[] for _ in model_stages]
    now = 0.0
    for tick in ticks:
        ends = [now]
        for stage, operations in enumerate(tick):
            start = now
            for operation in operations:
                done = start + costs.of(operation.kind, model_stages[stage][operation.chunk])
                lines[stage].append(Timed(operation, start, done))
                start = done
            ends.append(start)
        now = max(ends) + send
    return lines, now
