"""What a schedule is made of: rows of operations, and which stage of the model lies where."""

from dataclasses import dataclass
from functools import cached_property

from ._operation import Operation

Cell = tuple[Operation, ...]
"""What a stage does in one column of the table: nothing, one operation, or an F and a B."""


@dataclass(frozen=True)
class Table:
    """The data of a `Schedule`, which says what they are, and what follows from them alone."""

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    placement: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    lockstep: bool = False

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
        return all(op.kind == "F" for row in self.rows for op in row if op)

    @cached_property
    def splits(self) -> bool:
        """Whether B and W of some microbatch stand apart from each other."""
        return any(op.kind == "W" for row in self.rows for op in row if op)

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
    def stash(self) -> tuple[int, ...]:
        """Per device stage, the most that it holds at once of what F leaves for the way back.

        In microbatches of one chunk: one is held from the start of its F until the end of its W
        (or BW). A forward-only table holds none.
        """
        return tuple(_most_held(row) if not self.forward_only else 0 for row in self.rows)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Per device stage, the messages that it sends to another one in a step."""
        sent = [0] * self.num_stages
        for row in self.rows:
            for operation in filter(None, row):
                sent[operation.stage] += self.is_sent(operation)
        return tuple(sent)

    def is_sent(self, operation: Operation) -> bool:
        """Whether another device stage waits for what `operation` makes."""
        after = self.model_stage(operation) + (1 if operation.kind == "F" else -1)
        if operation.kind == "W" or not 0 <= after < self.num_model_stages:
            return False
        return self.placement[after] != operation.stage


def _most_held(row: tuple[Operation | None, ...]) -> int:
    held = most = 0
    for operation in filter(None, row):
        held += operation.kind == "F"
        most = max(most, held)
        held -= operation.kind in ("W", "BW")
    return most
