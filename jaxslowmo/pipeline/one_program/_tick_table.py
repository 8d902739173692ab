"""A schedule as integers that one program scans over, and the buffers whose rows they number."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..schedules import Operation, Schedule, Tick

Values = Sequence[jax.Array]
Buffers = list[jax.Array]

KINDS = ("", "F", "B", "W", "BW")
"""Kinds of operations by the number that stands for them."""

# A tick has four moments: cotangents of the tick before have arrived; F; B, W or BW; activations
# have arrived. So what is sent travels beside the half of the tick that does not wait for it, and
# is there two moments after its operation.
_FORWARD, _BACKWARD, _TRAVEL, _MOMENTS = 1, 2, 2, 4


Rows = dict[tuple[int, int], int]  # of a model stage and a microbatch
Channel = tuple[tuple[int, int], ...]
_Placed = tuple[int, Operation, int, int]  # tick, operation, its model stage and microbatch


Key = TypeVar("Key", bound=Hashable)


class Lifetime(NamedTuple):
    """From when on a value is kept until when it is last read, both included."""

    start: int
    end: int


def rows_of(lifetimes: Mapping[Key, Lifetime]) -> tuple[dict[Key, int], int]:
    """A row for every value, so that no two that live at the same time share one.

    Returns:
      The rows, and how many there are: the most values that live at once.
    """
    rows: dict[Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, which row
    count = 0
    for key, life in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < life.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        rows[key] = row
        heapq.heappush(busy, (life.end, row))
    return rows, count


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
    """Return the table of a schedule; of `ticks` in place of its own, if given."""
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
    distances = [(there - here) % schedule.num_stages for here, there in edges]
    known = sorted(set(distances))
    channels = tuple(
        tuple(sorted({edge for edge, n in zip(edges, distances, strict=True) if n == distance}))
        for distance in known
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
        own = (rows.get((k, m), 0) for rows in (arrived, stash, kept))
        values = KINDS.index(op.kind), k, m, *own
        for column, value in zip(half[:6], values, strict=True):
            column[t, op.stage] = value
        if op.kind != "W" and (to, m) in arrived:  # the receiver is told where to put it
            channel = half.arrivals[known.index(distances[min(k, to)])]
            channel[t + (op.kind != "F"), placement[to]] = arrived[to, m]

    def needed(rows: Rows) -> tuple[int, ...]:
        own = [[row for (k, _), row in rows.items() if k == i] for i in range(len(placement))]
        return tuple(1 + max(each, default=-1) for each in own)

    arrivals = max(needed(x)), max(needed(dy))
    return TickTable(forward, backward, channels, arrivals, needed(stash), needed(kept), len(ticks))


def forward_ticks(schedule: Schedule) -> Sequence[Tick]:
    """Return the schedule's forward passes alone, in the order of its rows, as early as can be."""
    rows = ([(op,) for op in row if op and op.kind == "F"] for row in schedule.rows)
    return replace(schedule, cells=tuple(map(tuple, rows)), lockstep=False).ticks()


def _rows(schedule: Schedule, operations: Sequence[_Placed]) -> list[Rows]:
    """Return the rows of activations, of cotangents, of what F leaves, and of what B leaves."""
    # BW is B and W.
    moments = {
        (kind, k, m): _MOMENTS * t + (_FORWARD if kind == "F" else _BACKWARD)
        for t, op, k, m in operations
        for kind in op.kind
    }

    def rows(made: str, sender: int, read: str) -> Rows:
        """Of what `made` of the stage `sender` stages on leaves for `read` of a stage."""
        found: Rows = {}
        for held in schedule.model_stages:
            lives: dict[tuple[int, int], Lifetime] = {}
            for k, m in product(held, range(schedule.num_microbatches)):
                start, end = moments.get((made, k + sender, m)), moments.get((read, k, m))
                if start is not None and end is not None and start != end:
                    lives[k, m] = Lifetime(start + _TRAVEL * (sender != 0), end)
            assert all(a <= b for a, b in lives.values()), "ticks keep dependencies"
            found |= rows_of(lives)[0]
        return found

    return [rows("F", -1, "F"), rows("B", 1, "B"), rows("F", 0, "W"), rows("B", 0, "W")]


def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return the placeholder for a row that holds no value; nothing may depend on it."""
    return jnp.zeros(shape, dtype)


def nothing(types: Sequence[Any]) -> list[jax.Array]:
    """Return placeholders of these types, which are sent where there is nothing to be sent."""
    return [empty(x.shape, x.dtype) for x in types]


class Ring:
    """Rows that each hold the values of one of several kinds of stages.

    Values of different kinds that are alike in shape and dtype share arrays, which have as many
    rows as the one of these kinds that keeps most.

    Args:
      kinds: per kind of stage the types of its values.
      rows: per kind of stage, how many of its values are kept at once.

    Attributes:
      types: for each array the type of one of its rows.
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
        """Buffers in which nothing lies."""
        types = zip(self._rows, self.types, strict=True)
        return [empty((rows, *x.shape), x.dtype) for rows, x in types]

    def read(self, buffers: Buffers, kind: int, row: jax.Array) -> tuple[jax.Array, ...]:
        """What lies in a row, for a stage of this kind."""
        return tuple(row_of(buffers[i], row) for i in self._places[kind])

    def written(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Buffers:
        """`buffers` with the values of a stage of this kind in a row."""
        new = list(buffers)
        for i, value in zip(self._places[kind], values, strict=True):
            new[i] = with_row(new[i], row, value)
        return new

    def spread(self, kind: int, values: Values) -> list[jax.Array]:
        """The values of a stage of this kind, each at the place of its array."""
        found = nothing(self.types)
        for i, value in zip(self._places[kind], values, strict=True):
            found[i] = value.astype(found[i].dtype)
        return found

    def used(self, kind: int | None) -> np.ndarray:
        """(arrays,) bool: in which of them a stage of this kind has values; None: in none."""
        found = np.zeros(len(self.types), bool)
        if kind is not None:
            found[self._places[kind]] = True
        return found


def row_of(buffer: jax.Array, row: Any) -> jax.Array:
    """A row of a buffer; of the only one without looking for it."""
    row = 0 if buffer.shape[0] == 1 else row
    return lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)


def with_row(buffer: jax.Array, row: Any, value: jax.Array) -> jax.Array:
    """`buffer` with another row."""
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0)


def received(buffers: Buffers, arrived: Values, row: jax.Array) -> Buffers:
    """`buffers` with what has arrived in a row, or as they were for row -1."""
    at = jnp.maximum(row, 0)
    return [row_set(*pair, at, row >= 0) for pair in zip(buffers, arrived, strict=True)]


def row_set(buffer: jax.Array, value: jax.Array, row: jax.Array, is_set: jax.Array) -> jax.Array:
    """`buffer` with another row where `is_set`, else as it was; no more than the row is moved."""
    row = jnp.minimum(row, buffer.shape[0] - 1)
    return with_row(buffer, row, jnp.where(is_set, value, row_of(buffer, row)))


class BufferWriting:
    """How the branches of a conditional write rows into buffers.

    TPU's compiler lets branches write where the buffers stand, so there they hand the buffers on
    with a row written. Others copy the whole of what a branch hands on: there a branch gives a row,
    which is written behind it. That takes the memory of some more rows.

    Args:
      ring: the rows of the buffers.
      kinds: for each branch but the first, which is idle, the kind of stage that leaves something;
        None where nothing is left.
      in_branches: whether branches write; see `writes_in_branches`.
    """

    def __init__(self, ring: Ring, kinds: Sequence[int | None], *, in_branches: bool) -> None:
        self._ring, self._in_branches = ring, in_branches
        self._used = np.stack([ring.used(kind) for kind in (None, *kinds)])

    def idle(self, buffers: Buffers) -> Values:
        """Return what a branch gives that leaves nothing."""
        return buffers if self._in_branches else nothing(self._ring.types)

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        """Return what a branch gives that leaves the values of a stage of this kind in a row."""
        if self._in_branches:
            return self._ring.written(buffers, kind, row, values)
        return self._ring.spread(kind, values)

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        """Return the buffers after branch number `branch` has given `left`."""
        if self._in_branches:
            return list(left)
        is_set = jnp.asarray(self._used)[branch]
        pairs = zip(buffers, left, strict=True)
        return [row_set(*pair, row, is_set[i]) for i, pair in enumerate(pairs)]


def writes_in_branches(mesh: Mesh) -> bool:
    """Return whether the compiler for these devices lets branches write where buffers stand."""
    return mesh.devices.flat[0].platform == "tpu"
