"""`Schedule`, a table of operations: what each stage of a pipeline computes, in which order."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest

from ._operations import (
    Cell,
    Costs,
    Done,
    Operation,
    PlacedOperation,
    Simulation,
    Tick,
    as_time,
    check_cells,
    checked_sizes,
    cost_table,
    simulate_free,
    simulate_lockstep,
    topological_order,
)

_PlacedCell = tuple[PlacedOperation, ...]  # the operations of one column of a device stage


@dataclass(frozen=True)
class Schedule:
    """A schedule as data: the operations of each device stage, in order.

    Functions such as `js.schedules.one_f_one_b` make it. The constructor checks that every
    operation occurs once, on the stage that holds it, and that no stage waits forever.

    Attributes:
      name: name of the function that made it, such as "one_f_one_b".
      num_stages: device stages of the pipeline.
      num_microbatches: microbatches of a step.
      num_chunks: stages of the model that a device stage holds.
      placement: the device stage that holds each stage of the model, in the model's order.
      cells: the operations of each device stage in each column of the table: none (idle), one, or
        an F and a backward operation that share the column.
      lockstep: whether the table is made for lockstep: its columns are ticks, and a column of F
        alone together with the next column of B (or BW) alone is one tick. If False, only the order
        of operations counts.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    placement: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    lockstep: bool = False

    def __post_init__(self) -> None:
        num_stages, num_microbatches, num_chunks = checked_sizes(
            self.num_stages, self.num_microbatches, self.num_chunks
        )
        if Counter(self.placement) != dict.fromkeys(range(num_stages), num_chunks):
            raise ValueError(
                f"`placement` must name each of {num_stages} device stages {num_chunks} times, got "
                f"{self.placement!r}."
            )
        if len(self.cells) != num_stages:
            raise ValueError(f"`cells` must hold {num_stages} rows, got {len(self.cells)}.")
        check_cells(self.name, self.cells, self.model_stages, num_microbatches)
        _ = self._order  # raises if the table deadlocks
        if self.lockstep and (early := _find_too_early(self._placed_cells, self.placement)):
            placed, needed = early
            raise ValueError(
                f"{self.name}: columns for lockstep are ticks, so {placed.letters} needs "
                f"{needed.kind} of microbatch {needed.microbatch} on stage {needed.model_stage} in "
                "an earlier column."
            )

    @cached_property
    def rows(self) -> tuple[tuple[Operation | None, ...], ...]:
        """The operations of each device stage, in order; None is idle."""
        return tuple(
            tuple(operation for cell in row for operation in cell or (None,)) for row in self.cells
        )

    @property
    def num_model_stages(self) -> int:
        """The number of stages of the model: `num_stages * num_chunks`."""
        return len(self.placement)

    @cached_property
    def forward_only(self) -> bool:
        """True if the table holds no backward operation."""
        return all(placed.operation.kind == "F" for placed in self._order)

    @cached_property
    def splits(self) -> bool:
        """True if B and W of some microbatch are separate operations."""
        return any(placed.operation.kind == "W" for placed in self._order)

    @cached_property
    def model_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of the model that each device stage holds, by chunk."""
        held: list[list[int]] = [[] for _ in range(self.num_stages)]
        for model_stage, stage in enumerate(self.placement):
            held[stage].append(model_stage)
        return tuple(map(tuple, held))

    def model_stage(self, operation: Operation) -> int:
        """Return the stage of the model that `operation` computes."""
        return self.model_stages[operation.stage][operation.chunk]

    @cached_property
    def stash(self) -> tuple[int, ...]:
        """The most microbatches that each device stage holds at once for the backward pass.

        A microbatch of a chunk is held from the start of its F until the end of its W (or BW). A
        forward-only table holds none.
        """
        if self.forward_only:
            return (0,) * self.num_stages
        change = {"F": 1, "B": 0, "W": -1, "BW": -1}
        held = (accumulate(change[op.kind] for op in filter(None, row)) for row in self.rows)
        return tuple(map(max, held))

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """The number of messages that each device stage sends to others in a step."""
        needs = (
            (placed.operation.stage, needed) for placed in self._order for needed in placed.needs
        )
        senders = Counter(
            self.placement[needed.model_stage]
            for stage, needed in needs
            if self.placement[needed.model_stage] != stage
        )
        return tuple(senders[stage] for stage in range(self.num_stages))

    def orders(self) -> list[str]:
        """Return the table in torch's notation: for each device stage a string of its operations.

        Such a string is "0F0,0F1,,3I0,3W0". Between commas are the stage of the model, the
        operation (F forward, I gradient of the input, W gradient of the weights, B both) and the
        microbatch. An empty cell is idle, and "(0F3;3B1)OVERLAP_F_B" is an F and a backward
        operation that share a column.
        """
        return [",".join(map(_cell_text, row)) for row in self._placed_cells]

    def __str__(self) -> str:
        """Return `orders` in columns, with a line for each device stage."""
        rows = [row.split(",") for row in self.orders()]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        lines = [" ".join(x.ljust(n) for x, n in zip(row, widths, strict=False)) for row in rows]
        sizes = f"{self.num_stages} stages, {self.num_microbatches} microbatches"
        return "\n".join([f"{self.name}: {sizes}", *(f"{i}: {x}" for i, x in enumerate(lines))])

    def ticks(self) -> tuple[Tick, ...]:
        """Return the operations of each stage in each tick, if all stages start ticks together.

        The result of an operation reaches other stages in the next tick. The ticks of a table for
        lockstep are its columns. In other tables every operation comes as early as its row allows,
        or in its column if all columns keep the dependencies and take no longer (with F = B = W).
        Ticks in which all stages are idle are left out.

        Returns:
          For each tick and device stage a tuple of 0, 1 or 2 operations; of two, F is the first.
        """
        return self._ticks

    @cached_property
    def _ticks(self) -> tuple[Tick, ...]:
        columns = [tick for tick in zip_longest(*self.cells, fillvalue=()) if any(tick)]
        if self.lockstep:
            return tuple(_merge_ticks(columns))
        packed = _pack_ticks(self._placed_cells)
        is_kept = _find_too_early(self._placed_cells, self.placement) is None
        return tuple(columns if is_kept and _even_time(columns) <= _even_time(packed) else packed)

    def simulate(
        self,
        *,
        forward: Costs = 1.0,
        backward_input: Costs = 1.0,
        backward_weight: Costs = 1.0,
        send: float = 0.0,
        lockstep: bool = False,
    ) -> Simulation:
        """Return the time, the bubble and the stash of one step, from the times of operations.

        Args:
          forward: time of F: one number for a whole device stage, which is divided by its number
            of chunks; one such number per device stage; or one per stage of the model (which is
            not divided).
          backward_input: time of B, in the same forms.
          backward_weight: time of W, in the same forms. BW takes B + W.
          send: time that a message takes. Stages that run freely do not wait while they send; in
            lockstep every tick ends with it.
          lockstep: whether all stages begin each tick together, so that it lasts as long as the
            slowest of them, as in one program with a permutation after each tick.

        Returns:
          A `Simulation`.

        Raises:
          ValueError: a time that is no finite number >= 0, times that are all 0, or a sequence
            of another length.
        """
        times = forward, backward_input, backward_weight
        costs = cost_table(self.placement, self.num_stages, *times)
        send = as_time("send", send)
        if lockstep:
            lines, time = simulate_lockstep(self.ticks(), self.model_stages, costs, send)
            cost = time
        else:
            lines = simulate_free(self._order, self.placement, costs, send)
            cost = max(line[-1].end - line[0].start for line in lines)
            time = max(line[-1].end for line in lines) - min(line[0].start for line in lines)
        costs_of_stages = [
            sum(costs.time(w.operation.kind, w.model_stage) for cell in row for w in cell)
            for row in self._placed_cells
        ]
        return Simulation(
            time=time,
            bubble=1 - sum(costs_of_stages) / len(costs_of_stages) / cost,
            stash=self.stash,
            sends=self.sends,
            timeline=tuple(map(tuple, lines)),
        )

    @cached_property
    def _placed_cells(self) -> tuple[tuple[_PlacedCell, ...], ...]:
        """The cells, in which each operation has its dependencies."""
        count = self.num_model_stages
        return tuple(
            tuple(
                tuple(
                    PlacedOperation.from_operation(op, self.model_stage(op), count) for op in cell
                )
                for cell in row
            )
            for row in self.cells
        )

    @cached_property
    def _order(self) -> list[PlacedOperation]:
        return topological_order(self.name, self._placed_cells, self.placement)


def _cell_text(cell: _PlacedCell) -> str:
    words = [placed.letters for placed in cell]
    return f"({';'.join(words)})OVERLAP_F_B" if len(words) > 1 else "".join(words)


def _even_time(ticks: Sequence[Tick]) -> int:
    """Return the time of ticks if F, B and W take one unit each, and BW two."""
    return sum(max(sum(len(op.kind) for op in cell) for cell in tick) for tick in ticks)


def _find_too_early(
    cells: Sequence[Sequence[_PlacedCell]], placement: Sequence[int]
) -> tuple[PlacedOperation, Done] | None:
    """Return an operation that is no later than one it needs of another stage, and that need."""
    columns = [(i, placed) for row in cells for i, cell in enumerate(row) for placed in cell]
    column_of = {placed.gives: i for i, placed in columns}
    for i, placed in columns:
        for needed in placed.needs:
            elsewhere = placement[needed.model_stage] != placed.operation.stage
            if elsewhere and column_of[needed] >= i:
                return placed, needed
    return None


def _pack_ticks(cells: Sequence[Sequence[_PlacedCell]]) -> list[Tick]:
    """Return ticks in which every cell comes as early as its row and dependencies allow."""
    rows = [deque(cell for cell in row if cell) for row in cells]
    done: set[Done] = set()
    ticks: list[Tick] = []
    while any(rows):
        ready = [len(row) > 0 and _is_ready(row[0], done) for row in rows]
        if not any(ready):
            # Some F shares its column with a B that depends on work which only this F can start.
            # Give the two a tick each.
            for row in rows:
                if row and _is_ready(row[0][:1], done):
                    forward, backward = row.popleft()
                    row.extendleft(((backward,), (forward,)))
            continue
        tick = [row.popleft() if now else () for row, now in zip(rows, ready, strict=True)]
        done |= {placed.gives for cell in tick for placed in cell}
        ticks.append(tuple(tuple(placed.operation for placed in cell) for cell in tick))
    return ticks


def _is_ready(cell: _PlacedCell, done: set[Done]) -> bool:
    """Return whether all dependencies of `cell` are done in earlier ticks or in the cell."""
    in_cell = {placed.gives for placed in cell}
    return all(needed in done or needed in in_cell for placed in cell for needed in placed.needs)


def _merge_ticks(ticks: Sequence[Tick]) -> list[Tick]:
    """Return ticks in which each tick of F alone is merged with the next one of B or BW alone."""
    merged: list[Tick] = []
    for tick in ticks:
        if merged and _has_only(merged[-1], "F") and _has_only(tick, "B", "BW"):
            merged[-1] = tuple(map(tuple.__add__, merged[-1], tick))
        else:
            merged.append(tick)
    return merged


def _has_only(tick: Tick, *kinds: str) -> bool:
    return all(operation.kind in kinds for cell in tick for operation in cell)
