"""What a schedule is made of: operations in rows, and which stage of the model lies where."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]
KINDS_OF_OPERATION: tuple[Kind, ...] = ("F", "B", "W", "BW")
TORCH_LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
"""torch's letters: I is the gradient of the input, W that of the weights, B is both at once."""


class Operation(NamedTuple):
    """What a device stage does at one time: one operation of one microbatch.

    `kind` is "F", the forward pass; "B", the gradient of the stage's input; "W", the gradient of
    its weights; or "BW", both in one. `chunk` counts the stages of the model that the device
    stage holds, in the order of the model.
    """

    kind: Kind
    stage: int
    chunk: int
    microbatch: int


class Needs(NamedTuple):
    """What others wait for: that `kind` of a microbatch is done on a stage of the model.

    "B" is here the gradient of the input, whether "B" or "BW" computes it.
    """

    kind: Literal["F", "B", "W"]
    model_stage: int
    microbatch: int


def gives(operation: Operation, model_stage: int) -> Needs:
    """What is there once `operation` is done."""
    kind = "B" if operation.kind == "BW" else operation.kind
    return Needs(kind, model_stage, operation.microbatch)


def needs(operation: Operation, model_stage: int, num_model_stages: int) -> list[Needs]:
    """What must be there before `operation` begins.

    F waits for F of the stage of the model before, B for its own F and for B of the stage after,
    W for its own B.
    """
    microbatch = operation.microbatch
    if operation.kind == "F":
        return [Needs("F", model_stage - 1, microbatch)] if model_stage else []
    if operation.kind == "W":
        return [Needs("B", model_stage, microbatch)]
    own = [Needs("F", model_stage, microbatch)]
    if model_stage + 1 < num_model_stages:
        own.append(Needs("B", model_stage + 1, microbatch))
    return own


def in_torch_letters(operation: Operation, model_stage: int) -> str:
    """`operation` as torch writes it, such as "3I0": stage of the model, letter, microbatch."""
    return f"{model_stage}{TORCH_LETTERS[operation.kind]}{operation.microbatch}"


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
