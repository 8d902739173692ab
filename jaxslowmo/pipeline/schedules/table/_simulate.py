"""How long a table takes: each stage as soon as it can, or all of them in lockstep."""

from dataclasses import dataclass
from typing import NamedTuple

from ._costs import CostTable
from ._rows import Needs, Operation, Table, gives, needs
from ._ticks import Tick


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
    table: Table, in_order: tuple[Operation, ...], costs: CostTable, send: float
) -> Simulation:
    """Every operation starts once its stage is free and what it needs has arrived."""
    lines: list[list[Timed]] = [[] for _ in range(table.num_stages)]
    end: dict[Needs, float] = {}
    for operation in in_order:
        stage, model_stage = operation.stage, table.model_stage(operation)
        start = lines[stage][-1].end if lines[stage] else 0.0
        for needed in needs(operation, model_stage, table.num_model_stages):
            elsewhere = table.placement[needed.model_stage] != stage
            start = max(start, end[needed] + send * elsewhere)
        done = start + costs.of(operation, model_stage)
        end[gives(operation, model_stage)] = done
        lines[stage].append(Timed(operation, start, done))
    longest = max(line[-1].end - line[0].start for line in lines)
    return _simulation(table, costs, lines, longest)


def in_lockstep(table: Table, ticks: tuple[Tick, ...], costs: CostTable, send: float) -> Simulation:
    """All stages start a tick together, which lasts as long as the longest of them and `send`."""
    lines: list[list[Timed]] = [[] for _ in range(table.num_stages)]
    now = 0.0
    for tick in ticks:
        ends = [now]
        for stage, operations in enumerate(tick):
            start = now
            for operation in operations:
                done = start + costs.of(operation, table.model_stage(operation))
                lines[stage].append(Timed(operation, start, done))
                start = done
            ends.append(start)
        now = max(ends) + send
    return _simulation(table, costs, lines, now, time=now)


def _simulation(
    table: Table,
    costs: CostTable,
    lines: list[list[Timed]],
    cost: float,
    time: float | None = None,
) -> Simulation:
    work = [sum(costs.of(t.operation, table.model_stage(t.operation)) for t in li) for li in lines]
    if time is None:
        time = max(line[-1].end for line in lines) - min(line[0].start for line in lines)
    return Simulation(
        time=time,
        bubble=1 - sum(work) / len(work) / cost,
        stash=table.stash,
        sends=table.sends,
        timeline=tuple(map(tuple, lines)),
    )
