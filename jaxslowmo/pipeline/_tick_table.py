"""A schedule as tables of integers, which one program scans over."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from .schedules import Operation, Schedule, Tick

KINDS = ("", "F", "B", "W", "BW")
"""The kinds of operations; a table has the index of a kind."""

# A tick has four moments: (0) cotangents of the last tick have arrived; (1) F; (2) B, W or BW;
# (3) activations have arrived. So a transfer overlaps with the half of the tick that does not wait
# for it, and ends two moments after its operation.
_FORWARD, _BACKWARD, _TRAVEL, _MOMENTS = 1, 2, 2, 4


_Key = tuple[int, int]  # stage of the model, microbatch
Rows = dict[_Key, int]  # maps a microbatch at a stage of the model to a row
Channel = tuple[tuple[int, int], ...]
_TimedOperation = tuple[int, Operation, int, int]  # tick, operation, its model stage and microbatch


class Lifetime(NamedTuple):
    """The moments from which on a value is kept and at which it is last read, both included."""

    start: int
    end: int


def assign_rows(lifetimes: Mapping[_Key, Lifetime]) -> Rows:
    """Return a row for every value, as few as no two values that live at the same time share."""
    rows: Rows = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # last moment in use, row
    for key, life in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < life.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        # All rows are free or busy, so their number is the next new row.
        rows[key] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (life.end, rows[key]))
    return rows


class HalfTick(NamedTuple):
    """The operations of devices in one half of every tick; int32 arrays (ticks, stages).

    Attributes:
      kind: index into `KINDS`.
      model_stage: stage of the model that the operation computes.
      microbatch: number of the operation's microbatch.
      source: row in the buffers of arrived values that the operation reads.
      stash: row in the buffers of the stash.
      kept: row in the buffers of arrays that B stores for W.
      arrivals: one array per channel, the row for the arriving value; -1 if nothing arrives.
    """

    kind: Any
    model_stage: Any
    microbatch: Any
    source: Any
    stash: Any
    kept: Any
    arrivals: tuple[Any, ...]


@dataclass(frozen=True)
class TickTable:
    """The operations of each device stage in each tick, and the buffer rows that they use.

    Attributes:
      forward: the first half of every tick, F.
      backward: the second half, B, W or BW.
      channels: permutations that send activations, each as (sender, receiver) pairs without a
        repeated stage; activations that stay on a device have their own channel. Cotangents take
        the opposite direction.
      arrivals: number of rows of the buffers for arrived activations, and for cotangents.
      stash: number of rows that each stage of the model needs for arrays that F stores; the maximum
        is the number that a device holds at once.
      kept: number of rows that each stage of the model needs for arrays that B stores for W.
      num_ticks: number of ticks of the scan.
    """

    forward: HalfTick
    backward: HalfTick
    channels: tuple[Channel, ...]
    arrivals: tuple[int, int]
    stash: tuple[int, ...]
    kept: tuple[int, ...]
    num_ticks: int


def tick_table(schedule: Schedule, ticks: Sequence[Tick] | None = None) -> TickTable:
    """Return the table of a schedule, or of `ticks` in place of the schedule's own ticks."""
    ticks = schedule.ticks() if ticks is None else ticks
    placement, shape = schedule.placement, (len(ticks), schedule.num_stages)
    operations: list[_TimedOperation] = [
        (t, op, schedule.model_stage(op), op.microbatch)
        for t, tick in enumerate(ticks)
        for cell in tick
        for op in cell
    ]
    x, dy, stash, kept = _rows(schedule, operations)
    edges = list(pairwise(placement))
    distances = [(receiver - sender) % schedule.num_stages for sender, receiver in edges]
    channel_distances = sorted(set(distances))
    channels = tuple(
        tuple(sorted({edge for edge, n in zip(edges, distances, strict=True) if n == distance}))
        for distance in channel_distances
    )
    forward, backward = (
        HalfTick(
            *np.zeros((6, *shape), np.int32),
            arrivals=tuple(np.full((len(channels), *shape), -1, np.int32)),
        )
        for _ in range(2)
    )
    for t, op, k, m in operations:
        half, arrived, to = (forward, x, k + 1) if op.kind == "F" else (backward, dy, k - 1)
        rows_used = (rows.get((k, m), 0) for rows in (arrived, stash, kept))
        values = KINDS.index(op.kind), k, m, *rows_used
        for column, value in zip(half[:6], values, strict=True):
            column[t, op.stage] = value
        if op.kind != "W" and (to, m) in arrived:  # the row in which the receiver stores it
            channel = half.arrivals[channel_distances.index(distances[min(k, to)])]
            channel[t + (op.kind != "F"), placement[to]] = arrived[to, m]

    def num_rows(rows: Rows) -> tuple[int, ...]:
        by_stage = [[row for (k, _), row in rows.items() if k == i] for i in range(len(placement))]
        return tuple(1 + max(each, default=-1) for each in by_stage)

    arrivals = max(num_rows(x)), max(num_rows(dy))
    return TickTable(
        forward, backward, channels, arrivals, num_rows(stash), num_rows(kept), len(ticks)
    )


def forward_ticks(schedule: Schedule) -> Sequence[Tick]:
    """Return ticks of only the schedule's forward passes, in row order, as early as possible."""
    rows = ([(op,) for op in row if op and op.kind == "F"] for row in schedule.rows)
    return replace(schedule, cells=tuple(map(tuple, rows)), lockstep=False).ticks()


def _rows(schedule: Schedule, operations: Sequence[_TimedOperation]) -> list[Rows]:
    """Return the rows of activations, of cotangents, of the stash of F, and of `kept` of B."""
    # BW counts as a B and a W.
    moments = {
        (kind, k, m): _MOMENTS * t + (_FORWARD if kind == "F" else _BACKWARD)
        for t, op, k, m in operations
        for kind in op.kind
    }

    def rows(writer: str, sender: int, reader: str) -> Rows:
        """Return the rows of results of `writer`, `sender` stages further on, for `reader`."""
        all_rows: Rows = {}
        for held in schedule.model_stages:
            lives: dict[_Key, Lifetime] = {}
            for k, m in product(held, range(schedule.num_microbatches)):
                start, end = moments.get((writer, k + sender, m)), moments.get((reader, k, m))
                if start is not None and end is not None and start != end:
                    lives[k, m] = Lifetime(start + _TRAVEL * (sender != 0), end)
            assert all(a <= b for a, b in lives.values()), "ticks keep dependencies"
            all_rows |= assign_rows(lives)
        return all_rows

    return [rows("F", -1, "F"), rows("B", 1, "B"), rows("F", 0, "W"), rows("B", 0, "W")]
