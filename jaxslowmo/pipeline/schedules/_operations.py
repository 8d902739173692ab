"""The operations of a schedule: their dependencies, an order that keeps these, and their times."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from ..._support.checks import as_number, checked_int

Kind = Literal["F", "B", "W", "BW"]
TORCH_LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
"""torch's letters: I is the gradient of the input, W that of the weights, B is both at once."""
_MEANING = {
    "F": "the forward pass (F)",
    "B": "the gradient of the input (I or B)",
    "W": "the gradient of the weights (W or B)",
}


class Operation(NamedTuple):
    """One unit of a device stage's work: an operation of one microbatch.

    `kind` is "F", the forward pass; "B", the gradient of the stage's input; "W", the gradient of
    its weights; or "BW", both in one. `chunk` is the index of the stage of the model among those
    that the device stage holds, in the order of the model.
    """

    kind: Kind
    stage: int
    chunk: int
    microbatch: int

    @property
    def letter(self) -> str:
        """torch's letter of its kind: F, I, W or B."""
        return TORCH_LETTERS[self.kind]


Cell = tuple[Operation, ...]
"""What a stage does in one column of the table: nothing, one operation, or an F and a B."""
Tick = tuple[Cell, ...]
"""The operations of each device stage in one tick: none, one, or an F and then a B (or BW)."""


class Done(NamedTuple):
    """The event that `kind` of a microbatch is done on a stage of the model.

    Operations wait for such events. "B" is the gradient of the input, computed by "B" or "BW".
    """

    kind: Literal["F", "B", "W"]
    model_stage: int
    microbatch: int


_Part = Literal["F", "B", "W"]
# For each kind of operation the kinds that it waits for, each with the offset of their stage.
_NEEDS: dict[_Part, tuple[tuple[_Part, int], ...]] = {
    "F": (("F", -1),),
    "B": (("F", 0), ("B", 1)),
    "W": (("B", 0),),
}


class PlacedOperation(NamedTuple):
    """An operation of a table, and its dependencies.

    Attributes:
      operation: the operation of the device stage.
      model_stage: the stage of the model that it computes.
      gives: the event that it completes.
      needs: the events that it waits for: F waits for F on the previous stage of the model, B for
        F on the same stage and B on the next one, W for B on the same stage.
    """

    operation: Operation
    model_stage: int
    gives: Done
    needs: tuple[Done, ...]

    @classmethod
    def from_operation(
        cls, operation: Operation, model_stage: int, num_model_stages: int
    ) -> "PlacedOperation":
        """Return `operation` on a stage of the model."""
        microbatch = operation.microbatch
        kind: _Part = "B" if operation.kind == "BW" else operation.kind
        needs = (Done(n, model_stage + distance, microbatch) for n, distance in _NEEDS[kind])
        needs = tuple(done for done in needs if 0 <= done.model_stage < num_model_stages)
        return cls(operation, model_stage, Done(kind, model_stage, microbatch), needs)

    @property
    def letters(self) -> str:
        """The operation in torch's notation, such as "3I0" on stage 3 of the model."""
        return f"{self.model_stage}{TORCH_LETTERS[self.operation.kind]}{self.operation.microbatch}"


# Checks of a table.


def checked_sizes(num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[int, int, int]:
    """Return the sizes of a schedule, each an int >= 1, or raise `ValueError`."""
    return (
        checked_int("`num_stages`", num_stages, 1),
        checked_int("`num_microbatches`", num_microbatches, 1),
        checked_int("`num_chunks`", num_chunks, 1),
    )


def check_chunks(kind: str, num_chunks: int, rule: int, instead: str) -> None:
    """Raise `ValueError` unless `num_chunks` is `rule`, the number that `kind` supports."""
    if num_chunks != rule:
        raise ValueError(f"{kind}: `num_chunks` must be {rule}, got {num_chunks}; {instead}.")


def check_cells(
    name: str,
    cells: Sequence[Sequence[Cell]],
    model_stages: Sequence[Sequence[int]],
    num_microbatches: int,
) -> None:
    """Raise `ValueError` unless the table has every operation once, in the row of its stage.

    Args:
      name: the name of the schedule, for messages.
      cells: the operations of each device stage in each column.
      model_stages: the stages of the model that each device stage holds, by chunk.
      num_microbatches: the number of microbatches of a step.
    """
    num_chunks = len(model_stages[0])
    seen: Counter[tuple[str, int, int]] = Counter()
    for stage, row in enumerate(cells):
        for cell in row:
            in_cell = [operation.kind for operation in cell]
            if len(cell) > 1 and in_cell not in (["F", "B"], ["F", "BW"]):
                raise ValueError(
                    f"{name}: operations that share a column must be an F and then a B or BW, got "
                    f"{in_cell} on stage {stage}."
                )
            for operation in cell:
                kinds, of_stage, chunk, microbatch = operation
                is_valid = kinds in TORCH_LETTERS and of_stage == stage
                in_range = 0 <= chunk < num_chunks and 0 <= microbatch < num_microbatches
                if not (is_valid and in_range):
                    raise ValueError(
                        f"{name}: operations of stage {stage} must be of kind F, B, W, BW, "
                        f"`chunk` < {num_chunks}, `microbatch` < {num_microbatches}, got "
                        f"{operation}."
                    )
                seen.update((kind, model_stages[stage][chunk], microbatch) for kind in kinds)
    kinds = "FBW" if any(kind != "F" for kind, _, _ in seen) else "F"
    every = range(len(cells) * num_chunks), range(num_microbatches), kinds
    for model_stage, microbatch, kind in product(*every):
        count = seen[kind, model_stage, microbatch]
        if count != 1:
            raise ValueError(
                f"{name}: {_MEANING[kind]} of microbatch {microbatch} on stage {model_stage} of "
                f"the model must be in the table once, not {count} times."
            )


def topological_order(
    name: str, cells: Sequence[Sequence[Sequence[PlacedOperation]]], placement: Sequence[int]
) -> list[PlacedOperation]:
    """Return all operations, each after those that it needs and those before it in its row.

    Args:
      name: the name of the schedule, for messages.
      cells: the operations of each device stage in each column.
      placement: the device stage of each stage of the model.

    Raises:
      ValueError: a deadlock; the message names an operation and what it waits for.
    """
    rows = [[placed for cell in row for placed in cell] for row in cells]
    positions = [0] * len(rows)
    done: set[Done] = set()
    order: list[PlacedOperation] = []
    waiting: dict[Done, int] = {}
    ready = list(range(len(rows)))
    while ready:
        stage = ready.pop()
        while positions[stage] < len(rows[stage]):
            placed = rows[stage][positions[stage]]
            missing = next((needed for needed in placed.needs if needed not in done), None)
            if missing is not None:
                waiting[missing] = stage
                break
            positions[stage] += 1
            order.append(placed)
            done.add(placed.gives)
            if placed.gives in waiting:
                ready.append(waiting.pop(placed.gives))
    if waiting:
        # Report the first stage that waits, what it waits for, and what blocks that.
        needed, stage = min(waiting.items(), key=lambda item: item[1])
        holder = placement[needed.model_stage]
        waits, blocks = (rows[row][positions[row]].letters for row in (stage, holder))
        what = next(placed.letters for placed in rows[holder] if placed.gives == needed)
        raise ValueError(
            f"{name}: the table deadlocks: stage {stage} waits at {waits} for {what}, which is on "
            f"stage {holder} after {blocks}."
        )
    return order


# Times.


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


def cost_table(placement: tuple[int, ...], num_stages: int, *times: Costs) -> CostTable:
    """Return the times of each stage of the model.

    Args:
      placement: the device stage of each stage of the model.
      num_stages: number of device stages.
      *times: the fields of `CostTable`, in order, each in a form that `Costs` allows.

    Raises:
      ValueError: times that are not finite, or negative, or all 0.
    """
    named = zip(CostTable._fields, times, strict=True)
    table = CostTable._make(_per_model_stage(n, x, placement, num_stages) for n, x in named)
    if not any(map(sum, table)):
        raise ValueError("`forward`, `backward_input` and `backward_weight` must not all be 0.")
    return table


def as_time(argument: str, value: object) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a finite number >= 0."""
    time = as_number(value)
    if time is None or time < 0:
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
        f"`{argument}` must be one time, {num_stages} (one per device stage) or {len(placement)} "
        f"(one per stage of the model), got {len(times)}."
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
