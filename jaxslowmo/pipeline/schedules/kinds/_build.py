"""Rows of steps made into a schedule."""

from collections.abc import Sequence
from typing import NamedTuple

from ..table import Kind, Operation, Schedule


class Step(NamedTuple):
    """An operation without its device stage, which its row tells."""

    kind: Kind
    chunk: int
    microbatch: int


def build(
    name: str,
    rows: Sequence[Sequence[Step | None]],
    num_microbatches: int,
    placement: tuple[int, ...],
    *,
    lockstep: bool = False,
) -> Schedule:
    """The schedule whose device stage s does `rows[s]`; None is idle."""
    cells = tuple(
        tuple(() if step is None else (Operation(step.kind, stage, *step[1:]),) for step in row)
        for stage, row in enumerate(rows)
    )
    num_chunks = len(placement) // len(rows)
    return Schedule(name, len(rows), num_microbatches, num_chunks, placement, cells, lockstep)


def round_robin(num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Stage k of the model on device stage k % p."""
    return tuple(range(num_stages)) * num_chunks


def v_shaped(num_stages: int) -> tuple[int, ...]:
    """Two chunks: down the stages and back up, so that the first one holds both ends."""
    return (*range(num_stages), *reversed(range(num_stages)))
