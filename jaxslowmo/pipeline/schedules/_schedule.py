"""A table of operations: which stage of a pipeline computes what, in which order."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from ._operations import (
    Cell,
    Done,
    Operation,
    PlacedOperation,
    Tick,
    as_sizes,
    check_cells,
    in_order,
)
from ._simulation import Costs, Simulation, as_time, cost_table, free_running, in_lockstep

_PlacedCell = tuple[PlacedOperation, ...]  # of one column of a device stage


@dataclass(frozen=True)
class Schedule:
    """A schedule as data: per device stage its operations in order.

    Made by the functions beside it, such as `js.schedules.one_f_one_b`, and checked when it is
    made: every operation is there once, on the stage that holds it, and no stage waits for ever.

    Attributes:
      name: what made it, such as "one_f_one_b".
      num_stages: device stages of the pipeline.
      num_microbatches: microbatches of a step.
      num_chunks: stages of the model that a device stage holds.
      placement: of each stage of the model, in its order, the device stage that holds it.
      cells: per device stage what it does in each column of the table: no operation (idle), one,
        or an F and a backward operation that share the column.
      lockstep: whether the table is made for lockstep, so that its columns are ticks, and a
        column of F alone with the column of B (or BW) alone after it is one; else only the order
        counts.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    placement: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    lockstep: bool = False

    def __post_init__(self) -> None:
        num_stages, num_microbatches, num_chunks = as_sizes(
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
        _ = self._order  # raises where a stage waits for ever
        if self.lockstep and (early := _too_early(self._placed, self.placement)):
            placed, needed = early
            raise ValueError(
                f"{self.name}: the columns of a table for lockstep are ticks, but {placed.letters} "
                f"of stage {placed.operation.stage} needs {needed.kind} of microbatch "
                f"{needed.microbatch} on stage {needed.model_stage} of the model, which stands in "
                "no earlier column."
            )

    @cached_property
    def rows(self) -> tuple[tuple[Operation | None, ...], ...]:
        """Per device stage its operations in order; None is idle."""
        return tuple(
            tuple(operation for cell in row for operation in cell or (None,)) for row in self.cells
        )

    @property
    def num_model_stages(self) -> int:
        """Stages of the model: `num_stages * num_chunks`."""
        return len(self.placement)

    @cached_property
    def forward_only(self) -> bool:
        """Whether the table holds no backward operation."""
        return all(placed.operation.kind == "F" for placed in self._order)

    @cached_property
    def splits(self) -> bool:
        """Whether B and W of some microbatch stand apart from each other."""
        return any(placed.operation.kind == "W" for placed in self._order)

    @cached_property
    def model_stages(self) -> tuple[tuple[int, ...], ...]:
        """Per device stage the stages of the model that it holds, by chunk."""
        held: list[list[int]] = [[] for _ in range(self.num_stages)]
        for model_stage, stage in enumerate(self.placement):
            held[stage].append(model_stage)
        return tuple(map(tuple, held))

    def model_stage(self, operation: Operation) -> int:
        """The stage of the model that `operation` computes."""
        return self.model_stages[operation.stage][operation.chunk]

    @cached_property
    def in_order(self) -> tuple[Operation, ...]:
        """All operations, none before one that it needs: an order for a single dispatcher."""
        return tuple(placed.operation for placed in self._order)

    @cached_property
    def stash(self) -> tuple[int, ...]:
        """Per device stage, the most that it holds at once of what F leaves for the way back.

        In microbatches of one chunk: one is held from the start of its F until the end of its W
        (or BW). A forward-only table holds none.
        """
        return self.most_held([1] * self.num_model_stages, [0] * self.num_model_stages)

    def most_held(self, left: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
        """Per device stage, the most that it holds at once of what F and B leave.

        Args:
          left: per stage of the model, what F leaves until W (or BW) is done.
          kept: per stage of the model, what B leaves for W.

        Returns:
          In the unit of both; 0 for a forward-only table.
        """
        if self.forward_only:
            return (0,) * self.num_stages
        most = []
        for row in self.rows:
            now = peak = 0
            for operation in filter(None, row):
                k = self.model_stage(operation)
                now += {"F": left[k], "B": kept[k]}.get(operation.kind, 0)
                peak = max(peak, now)
                now -= {"W": left[k] + kept[k], "BW": left[k]}.get(operation.kind, 0)
            most.append(peak)
        return tuple(most)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Per device stage, the messages that it sends to another one in a step."""
        senders = Counter(op.stage for op in self.in_order if self.is_sent(op))
        return tuple(senders[stage] for stage in range(self.num_stages))

    def is_sent(self, operation: Operation) -> bool:
        """Whether another device stage waits for what `operation` makes."""
        after = self.model_stage(operation) + (1 if operation.kind == "F" else -1)
        if operation.kind == "W" or not 0 <= after < self.num_model_stages:
            return False
        return self.placement[after] != operation.stage

    def orders(self) -> list[str]:
        """The table in torch's notation: per device stage a string such as "0F0,0F1,,3I0,3W0".

        Between commas: stage of the model, operation (F forward, I gradient of the input, W
        gradient of the weights, B both), microbatch. Nothing is idle, and
        "(0F3;3B1)OVERLAP_F_B" is an F and a backward operation that share a column.
        """
        return [",".join(map(_in_letters, row)) for row in self._placed]

    def ticks(self) -> tuple[Tick, ...]:
        """What each stage does in each tick, where all stages begin every tick together.

        What an operation makes is with other stages in the tick after. Ticks are the columns of
        a table that is made for lockstep. In others every operation comes as early as its row
        allows, or in its column where all columns keep the dependencies and take no longer (with
        F = B = W). Ticks in which nobody does anything are left out.

        Returns:
          Per tick and device stage a tuple of 0, 1 or 2 operations; of two, F is the first.
        """
        return self._ticks

    @cached_property
    def _ticks(self) -> tuple[Tick, ...]:
        columns = [tick for tick in zip_longest(*self.cells, fillvalue=()) if any(tick)]
        if self.lockstep:
            return tuple(_joined(columns))
        packed = _packed(self._placed)
        is_kept = _too_early(self._placed, self.placement) is None
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
        """Time, bubble and stash of one step under given times.

        Args:
          forward: time of F; one number for a whole device stage, whose chunks divide it, one
            number per device stage, or one per stage of the model (which are not divided).
          backward_input: time of B, likewise.
          backward_weight: time of W, likewise. BW takes B + W.
          send: time until what is sent has arrived. Free-running it blocks nobody; in lockstep
            every tick ends with it.
          lockstep: whether all stages begin each tick together, so that it lasts as long as the
            longest of them, as in one program with a permutation after each tick.

        Returns:
          A `Simulation`.

        Raises:
          ValueError: a time that is no finite number >= 0, times that are all 0, or a sequence
            of another length.
        """
        times = {"forward": forward, "backward_input": backward_input}
        times["backward_weight"] = backward_weight
        costs = cost_table(self.placement, self.num_stages, **times)
        send = as_time("send", send)
        if lockstep:
            lines, time = in_lockstep(self.ticks(), self.model_stages, costs, send)
            cost = time
        else:
            lines = free_running(self._order, self.placement, costs, send)
            cost = max(line[-1].end - line[0].start for line in lines)
            time = max(line[-1].end for line in lines) - min(line[0].start for line in lines)
        costs_of_stages = [
            sum(costs.of(w.operation.kind, w.model_stage) for cell in row for w in cell)
            for row in self._placed
        ]
        return Simulation(
            time=time,
            bubble=1 - sum(costs_of_stages) / len(costs_of_stages) / cost,
            stash=self.stash,
            sends=self.sends,
            timeline=tuple(map(tuple, lines)),
        )

    @cached_property
    def _placed(self) -> tuple[tuple[_PlacedCell, ...], ...]:
        """The cells, with what each operation waits for."""
        count = self.num_model_stages
        return tuple(
            tuple(
                tuple(PlacedOperation.of(op, self.model_stage(op), count) for op in cell)
                for cell in row
            )
            for row in self.cells
        )

    @cached_property
    def _order(self) -> list[PlacedOperation]:
        return in_order(self.name, self._placed, self.placement)


def _in_letters(cell: _PlacedCell) -> str:
    words = [placed.letters for placed in cell]
    return f"({';'.join(words)})OVERLAP_F_B" if len(words) > 1 else "".join(words)


def _even_time(ticks: Sequence[Tick]) -> int:
    """How long ticks last where F, B and W take one unit each, and BW two."""
    return sum(max(sum(len(op.kind) for op in cell) for cell in tick) for tick in ticks)


def _too_early(
    cells: Sequence[Sequence[_PlacedCell]], placement: Sequence[int]
) -> tuple[PlacedOperation, Done] | None:
    """An operation whose column does not come after that of what another stage gives it."""
    columns = [(i, placed) for row in cells for i, cell in enumerate(row) for placed in cell]
    column_of = {placed.gives: i for i, placed in columns}
    for i, placed in columns:
        for needed in placed.needs:
            elsewhere = placement[needed.model_stage] != placed.operation.stage
            if elsewhere and column_of[needed] >= i:
                return placed, needed
    return None


def _packed(cells: Sequence[Sequence[_PlacedCell]]) -> list[Tick]:
    """Every cell in the earliest tick that its row and what it needs allow."""
    rows = [deque(cell for cell in row if cell) for row in cells]
    done: set[Done] = set()
    ticks: list[Tick] = []
    while any(rows):
        ready = [len(row) > 0 and _can(row[0], done) for row in rows]
        if not any(ready):
            # An F and a B that share a column wait for what the F alone would set off.
            for row in rows:
                if row and _can(row[0][:1], done):
                    forward, backward = row.popleft()
                    row.extendleft(((backward,), (forward,)))
            continue
        tick = [row.popleft() if now else () for row, now in zip(rows, ready, strict=True)]
        done |= {placed.gives for cell in tick for placed in cell}
        ticks.append(tuple(tuple(placed.operation for placed in cell) for cell in tick))
    return ticks


def _can(cell: _PlacedCell, done: set[Done]) -> bool:
    """Whether all is done that `cell` needs of ticks before."""
    own = {placed.gives for placed in cell}
    return all(needed in done or needed in own for placed in cell for needed in placed.needs)


def _joined(ticks: Sequence[Tick]) -> list[Tick]:
    """Ticks of F alone joined with the ticks of B or BW alone that follow them."""
    joined: list[Tick] = []
    for tick in ticks:
        if joined and _only(joined[-1], "F") and _only(tick, "B", "BW"):
            joined[-1] = tuple(map(tuple.__add__, joined[-1], tick))
        else:
            joined.append(tick)
    return joined


def _only(tick: Tick, *kinds: str) -> bool:
    return all(operation.kind in kinds for cell in tick for operation in cell)
