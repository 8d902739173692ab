"""The basic schedules, GPipe and 1F1B, and the helpers that build the table of any schedule."""

from collections.abc import Sequence
from typing import NamedTuple

from ..._support.checks import checks_flags
from ._operations import Kind, Operation, as_sizes, check_chunks
from ._schedule import Schedule


class RowEntry(NamedTuple):
    """An operation without its device stage, which is the index of its row."""

    kind: Kind
    chunk: int
    microbatch: int


def build(
    name: str,
    rows: Sequence[Sequence[RowEntry | None]],
    num_microbatches: int,
    placement: tuple[int, ...],
    *,
    lockstep: bool = False,
) -> Schedule:
    """Return the schedule in which device stage s runs `rows[s]`; a None entry is idle."""
    cells = tuple(
        tuple(() if step is None else (Operation(step.kind, stage, *step[1:]),) for step in row)
        for stage, row in enumerate(rows)
    )
    num_chunks = len(placement) // len(rows)
    return Schedule(name, len(rows), num_microbatches, num_chunks, placement, cells, lockstep)


def round_robin(num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the placement of model stage k on device stage k % num_stages."""
    return tuple(range(num_stages)) * num_chunks


def v_placement(num_stages: int) -> tuple[int, ...]:
    """Return the placement of two chunks, down the stages and back up: stage 0 has both ends."""
    return (*range(num_stages), *reversed(range(num_stages)))


@checks_flags("schedules.gpipe")
def gpipe(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Make the GPipe schedule: all forward passes, then all backward passes.

    The bubble is (p - 1) / (v m + p - 1) for p stages, m microbatches and v chunks (m >= p), and
    every stage holds all m microbatches of all of its chunks.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model is placed
        on device stage k % p (a circular pipeline).
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    forward = [RowEntry("F", c, i) for c in range(num_chunks) for i in range(num_microbatches)]
    backward = [
        RowEntry("BW", c, i) for c in reversed(range(num_chunks)) for i in range(num_microbatches)
    ]
    row = forward if forward_only else forward + backward
    return build("gpipe", [row] * num_stages, num_microbatches, round_robin(num_stages, num_chunks))


@checks_flags("schedules.one_f_one_b")
def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Make Megatron's 1F1B schedule: after a warm-up, one F and one backward pass alternate.

    The bubble is GPipe's, (p - 1) / (m + p - 1), but stage s holds only min(p - s, m) microbatches.
    It suits stages that each start as soon as they can; for stages in lockstep see `lockstep`.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: must be 1; for more use `interleaved`.
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, or several chunks.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    check_chunks("one_f_one_b", num_chunks, 1, "use 'interleaved' for more")
    rows = [
        _stage_row(num_microbatches, num_stages - 1 - stage, forward_only)
        for stage in range(num_stages)
    ]
    return build("one_f_one_b", rows, num_microbatches, round_robin(num_stages, 1))


def _stage_row(num_microbatches: int, warm_up: int, forward_only: bool) -> list[RowEntry]:
    forward = [RowEntry("F", 0, i) for i in range(num_microbatches)]
    if forward_only:
        return forward
    warm_up = min(warm_up, num_microbatches)
    row = forward[:warm_up]
    for index in range(num_microbatches):
        row += [*forward[warm_up + index : warm_up + index + 1], RowEntry("BW", 0, index)]
    return row
