"""A schedule as tables of integers that one program scans over, and buffers with numbered rows."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..schedules import Operation, Schedule, Tick

Values = Sequence[jax.Array]
Buffers = list[jax.Array]

KINDS = ("", "F", "B", "W", "BW")
"""The kinds of operations; a table has the index of a kind."""

# A tick has four moments: (0) cotangents of the last tick have arrived; (1) F; (2) B, W or BW;
# (3) activations have arrived. So a transfer overlaps with the half of the tick that does not wait
# for it, and ends two moments after its operation.
_FORWARD, _BACKWARD, _TRAVEL, _MOMENTS = 1, 2, 2, 4


_Key = tuple[int, int]  # stage of the model, microbatch
Rows = dict[_Key, int]  # maps a microbatch at a stage of the model to a row
Channel = tuple[tuple[int, int], ...]
_Placed = tuple[int, Operation, int, int]  # tick, operation, its model stage and microbatch


class Lifetime(NamedTuple):
    """The moments from which on a value is kept and at which it is last read, both included."""

    start: int
    end: int


def rows_of(lifetimes: Mapping[_Key, Lifetime]) -> Rows:
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


class Half(NamedTuple):
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

    forward: Half
    backward: Half
    channels: tuple[Channel, ...]
    arrivals: tuple[int, int]
    stash: tuple[int, ...]
    kept: tuple[int, ...]
    num_ticks: int


def tick_table(schedule: Schedule, ticks: Sequence[Tick] | None = None) -> TickTable:
    """Return the table of a schedule, or of `ticks` in place of the schedule's own ticks."""
    ticks = schedule.ticks() if ticks is None else ticks
    placement, shape = schedule.placement, (len(ticks), schedule.num_stages)
    operations: list[_Placed] = [
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
        Half(
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

    def needed(rows: Rows) -> tuple[int, ...]:
        by_stage = [[row for (k, _), row in rows.items() if k == i] for i in range(len(placement))]
        return tuple(1 + max(each, default=-1) for each in by_stage)

    arrivals = max(needed(x)), max(needed(dy))
    return TickTable(forward, backward, channels, arrivals, needed(stash), needed(kept), len(ticks))


def forward_ticks(schedule: Schedule) -> Sequence[Tick]:
    """Return ticks of only the schedule's forward passes, in row order, as early as possible."""
    rows = ([(op,) for op in row if op and op.kind == "F"] for row in schedule.rows)
    return replace(schedule, cells=tuple(map(tuple, rows)), lockstep=False).ticks()


def _rows(schedule: Schedule, operations: Sequence[_Placed]) -> list[Rows]:
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
            all_rows |= rows_of(lives)
        return all_rows

    return [rows("F", -1, "F"), rows("B", 1, "B"), rows("F", 0, "W"), rows("B", 0, "W")]


def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return the placeholder for a row that holds no value; nothing may depend on it."""
    return jnp.zeros(shape, dtype)


def nothing(types: Sequence[Any]) -> list[jax.Array]:
    """Return placeholders of these types, which a device sends if it has no result to send."""
    return [empty(x.shape, x.dtype) for x in types]


class Ring:
    """A layout of buffers whose rows each hold the values of a stage, of any of several kinds.

    Values of different kinds with equal shape and dtype share a buffer, which has as many rows as
    the kind that needs most.

    Args:
      kinds: types of the values of each kind of stage.
      rows: number of rows that each kind of stage needs.

    Attributes:
      types: the type of a row of each buffer.
    """

    def __init__(self, kinds: Sequence[Sequence[Any]], rows: Sequence[int]) -> None:
        self.types: list[jax.ShapeDtypeStruct] = []
        self._rows: list[int] = []
        self._places: list[list[int]] = []
        for values, count in zip(kinds, rows, strict=True):
            free = list(range(len(self.types)))
            places = []
            for value in values:
                kind = jax.ShapeDtypeStruct(value.shape, value.dtype)
                place = next((i for i in free if self.types[i] == kind), None)
                if place is None:
                    place = len(self.types)
                    self.types.append(kind)
                    self._rows.append(count)
                else:
                    free.remove(place)
                    self._rows[place] = max(self._rows[place], count)
                places.append(place)
            self._places.append(places)

    def start(self) -> Buffers:
        """Return empty buffers."""
        types = zip(self._rows, self.types, strict=True)
        return [empty((rows, *x.shape), x.dtype) for rows, x in types]

    def read(self, buffers: Buffers, kind: int, row: jax.Array) -> tuple[jax.Array, ...]:
        """Return the values of a stage of this kind in a row."""
        return tuple(row_of(buffers[i], row) for i in self._places[kind])

    def written(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Buffers:
        """Return `buffers` with the values of a stage of this kind written to a row."""
        new = list(buffers)
        for i, value in zip(self._places[kind], values, strict=True):
            new[i] = with_row(new[i], row, value)
        return new

    def spread(self, kind: int, values: Values) -> list[jax.Array]:
        """Return the values of a stage of this kind by buffer; placeholders for other buffers."""
        rows = nothing(self.types)
        for i, value in zip(self._places[kind], values, strict=True):
            rows[i] = value.astype(rows[i].dtype)
        return rows

    def used(self, kind: int | None) -> np.ndarray:
        """Return (buffers,) bool: whether a stage of this kind has values there; None: no."""
        is_used = np.zeros(len(self.types), bool)
        if kind is not None:
            is_used[self._places[kind]] = True
        return is_used


def row_of(buffer: jax.Array, row: Any) -> jax.Array:
    """Return a row of a buffer; for a buffer of one row, with a constant index."""
    row = 0 if buffer.shape[0] == 1 else row
    return lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)


def with_row(buffer: jax.Array, row: Any, value: jax.Array) -> jax.Array:
    """Return `buffer` with one row replaced."""
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0)


def received(buffers: Buffers, arrived: Values, row: jax.Array) -> Buffers:
    """Return `buffers` with the arrived values in a row; unchanged for row -1."""
    at = jnp.maximum(row, 0)
    return [row_set(*pair, at, row >= 0) for pair in zip(buffers, arrived, strict=True)]


def row_set(buffer: jax.Array, value: jax.Array, row: jax.Array, is_set: jax.Array) -> jax.Array:
    """Return `buffer` with a row replaced if `is_set`; only this row is copied in either case."""
    row = jnp.minimum(row, buffer.shape[0] - 1)
    return with_row(buffer, row, jnp.where(is_set, value, row_of(buffer, row)))


class BufferWriting:
    """The way in which branches of a conditional write rows to buffers.

    On TPU the compiler writes to the buffers in place inside of branches, so branches return the
    buffers with a row written. Other compilers copy all results of a branch: there a branch returns
    only the row, which is written after the conditional. That takes the memory of a few more rows.

    Args:
      ring: the layout of the buffers.
      kinds: the kind of stage whose values each branch writes, without branch 0, which is idle;
        None for a branch that writes nothing.
      in_branches: whether branches write; see `writes_in_branches`.
    """

    def __init__(self, ring: Ring, kinds: Sequence[int | None], *, in_branches: bool) -> None:
        self._ring, self._in_branches = ring, in_branches
        self._used = np.stack([ring.used(kind) for kind in (None, *kinds)])

    def idle(self, buffers: Buffers) -> Values:
        """Return the result of a branch that writes nothing."""
        return buffers if self._in_branches else nothing(self._ring.types)

    def result(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        """Return the result of a branch that writes a stage's values to a row."""
        if self._in_branches:
            return self._ring.written(buffers, kind, row, values)
        return self._ring.spread(kind, values)

    def merged(
        self, buffers: Buffers, result: Values, row: jax.Array, branch: jax.Array
    ) -> Buffers:
        """Return the buffers after branch number `branch` has returned `result`."""
        if self._in_branches:
            return list(result)
        is_set = jnp.asarray(self._used)[branch]
        pairs = zip(buffers, result, strict=True)
        return [row_set(*pair, row, is_set[i]) for i, pair in enumerate(pairs)]


def writes_in_branches(mesh: Mesh) -> bool:
    """Return whether the compiler for these devices writes to buffers in place in branches."""
    return mesh.devices.flat[0].platform == "tpu"
