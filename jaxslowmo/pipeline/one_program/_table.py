"""A schedule as the integers that one program scans over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..schedules import Operation, Schedule, Tick
from ._rings import Lifetime, rows_of

KINDS = ("", "F", "B", "W", "BW")
"""Kinds of operations by the number that stands for them."""

# A tick has four moments: cotangents of the tick before have arrived; F; B, W or BW; activations
# have arrived. So what is sent travels beside the half of the tick that does not wait for it.
_COTANGENTS, _FORWARD, _BACKWARD, _ACTIVATIONS = range(4)
_MOMENTS = 4


Rows = dict[tuple[int, int], int]  # of a model stage and a microbatch
Channel = tuple[tuple[int, int], ...]


class Half(NamedTuple):
    """What a device does in one half of a tick; arrays (ticks, stages).

    Attributes:
      kind: a number of `KINDS`.
      model_stage: of the operation.
      microbatch: of the operation.
      source: row of the buffer of arrivals that it reads.
      stash: row of what its F leaves.
      kept: row of what its B leaves for its W.
      arrivals: by channel, the row that takes what arrives; -1 for nothing.
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
    """What each device stage does in each tick, and where it finds and leaves things.

    Attributes:
      forward: the first half of every tick, F.
      backward: the second, B, W or BW.
      channels: the ways of activations, each as (sender, receiver) pairs in which no stage is
        twice; those that stay on a device have one of their own. Cotangents travel back.
      arrivals: rows of the buffers of what has arrived, activations and cotangents.
      stash: per stage of the model, the rows of what F leaves that it needs; the most of them is
        what a device holds at once.
      kept: per stage of the model, the rows of what B leaves for W.
      num_ticks: of the scan.
    """

    forward: Half
    backward: Half
    channels: tuple[Channel, ...]
    arrivals: tuple[int, int]
    stash: tuple[int, ...]
    kept: tuple[int, ...]
    num_ticks: int


def tick_table(schedule: Schedule, ticks: Sequence[Tick] | None = None) -> TickTable:
    """The table of a schedule; of `ticks` in place of its own, if given."""
    return _Tabulation(schedule, schedule.ticks() if ticks is None else ticks).table()


def forward_ticks(schedule: Schedule) -> list[Tick]:
    """The schedule's forward passes alone, in the order of its rows, as early as can be."""
    rows = [[op for op in row if op and op.kind == "F"] for row in schedule.rows]
    at = [0] * schedule.num_stages
    done: dict[tuple[int, int], int] = {}
    ticks: list[Tick] = []
    while any(i < len(row) for i, row in zip(at, rows, strict=True)):
        tick = []
        for stage, row in enumerate(rows):
            op = row[at[stage]] if at[stage] < len(row) else None
            before = (schedule.model_stage(op) - 1, op.microbatch) if op else (-1, 0)
            ready = op and (before[0] < 0 or done.get(before, len(ticks)) < len(ticks))
            tick.append((op,) if op and ready else ())
        for stage, cell in enumerate(tick):
            for op in cell:
                at[stage] += 1
                done[schedule.model_stage(op), op.microbatch] = len(ticks)
        ticks.append(tuple(tick))
    return ticks


class _Tabulation:
    def __init__(self, schedule: Schedule, ticks: Sequence[Tick]) -> None:
        self._schedule, self._ticks = schedule, ticks
        placement = schedule.placement
        shape = len(ticks), schedule.num_stages
        edges = list(pairwise(placement))
        places = [(there - here) % schedule.num_stages for here, there in edges]
        known = sorted(set(places))
        self._channel = [known.index(n) for n in places]  # after each stage of the model
        self._channels = tuple(
            tuple(sorted({edge for edge, n in zip(edges, places, strict=True) if n == m}))
            for m in known
        )

        def half() -> Half:
            columns = [np.zeros(shape, np.int32) for _ in range(6)]
            nothing = tuple(np.full(shape, -1, np.int32) for _ in self._channels)
            return Half(*columns, arrivals=nothing)

        self._forward, self._backward = half(), half()
        # When each operation of (kind, model stage, microbatch) happens; BW is B and W.
        self._when: dict[tuple[str, int, int], int] = {}
        for t, tick in enumerate(ticks):
            for op in (op for cell in tick for op in cell):
                for kind in op.kind:
                    self._when[kind, schedule.model_stage(op), op.microbatch] = t

    def table(self) -> TickTable:
        schedule = self._schedule
        last = len(schedule.placement) - 1
        x = self._rows(lambda k, m: self._arrival(k, m, _ACTIVATIONS) if k else None)
        dy = self._rows(lambda k, m: self._arrival(k, m, _COTANGENTS) if k < last else None)
        stash = self._rows(lambda k, m: self._life("F", "W", k, m))
        kept = self._rows(lambda k, m: self._life("B", "W", k, m) if self._apart(k, m) else None)
        for t, tick in enumerate(self._ticks):
            for op in (op for cell in tick for op in cell):
                key = schedule.model_stage(op), op.microbatch
                half = self._forward if op.kind == "F" else self._backward
                values = (
                    KINDS.index(op.kind),
                    *key,
                    (x if op.kind == "F" else dy)[0].get(key, 0),
                    stash[0].get(key, 0),
                    kept[0].get(key, 0),
                )
                for column, value in zip(half[:6], values, strict=True):
                    column[t, op.stage] = value
                self._send(op, t, x[0], dy[0])
        return TickTable(
            self._forward,
            self._backward,
            self._channels,
            (x[1], dy[1]),
            self._needed(stash[0]),
            self._needed(kept[0]),
            len(self._ticks),
        )

    def _rows(self, life: Callable[[int, int], Lifetime | None]) -> tuple[Rows, int]:
        """Rows of the values of each model stage and microbatch that have a life, by device."""
        rows: Rows = {}
        most = 0
        for held in self._schedule.model_stages:
            keys = [(k, m) for k in held for m in range(self._schedule.num_microbatches)]
            lives = {key: found for key in keys if (found := life(*key))}
            own, count = rows_of(lives)
            rows |= own
            most = max(most, count)
        return rows, most

    def _needed(self, rows: Rows) -> tuple[int, ...]:
        needed = [0] * len(self._schedule.placement)
        for (k, _), row in rows.items():
            needed[k] = max(needed[k], row + 1)
        return tuple(needed)

    def _arrival(self, k: int, m: int, moment: int) -> Lifetime | None:
        """Of what a stage of the model is sent: from when it arrives until it is used."""
        kind, sender, used = "F", k - 1, _FORWARD
        if moment == _COTANGENTS:
            kind, sender, used = "B", k + 1, _BACKWARD
        if (kind, k, m) not in self._when:
            return None
        made, read = self._when[kind, sender, m], self._when[kind, k, m]
        assert made < read, "the ticks of a schedule keep its dependencies"
        arrived = made + (moment == _COTANGENTS)
        return Lifetime(_MOMENTS * arrived + moment, _MOMENTS * read + used)

    def _life(self, first: str, last: str, k: int, m: int) -> Lifetime | None:
        if (last, k, m) not in self._when:
            return None
        start = _MOMENTS * self._when[first, k, m] + (_FORWARD if first == "F" else _BACKWARD)
        return Lifetime(start, _MOMENTS * self._when[last, k, m] + _BACKWARD)

    def _apart(self, k: int, m: int) -> bool:
        return self._when.get(("B", k, m)) != self._when.get(("W", k, m))

    def _send(self, op: Operation, t: int, x: Rows, dy: Rows) -> None:
        """Tell the receiver of what an operation makes where to put it."""
        k, placement = self._schedule.model_stage(op), self._schedule.placement
        if op.kind == "F" and (k + 1, op.microbatch) in x:
            row = x[k + 1, op.microbatch]
            self._forward.arrivals[self._channel[k]][t, placement[k + 1]] = row
        elif "B" in op.kind and (k - 1, op.microbatch) in dy:
            row = dy[k - 1, op.microbatch]
            self._backward.arrivals[self._channel[k - 1]][t + 1, placement[k - 1]] = row
