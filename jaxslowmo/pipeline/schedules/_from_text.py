"""Make a schedule from the name of its kind, or from a table in torch's notation."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..._support.checks import checks_flags
from ._kinds import gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from ._lockstep import lockstep
from ._operations import TORCH_LETTERS, Kind, Operation
from ._schedule import Schedule

KINDS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {make.__name__: make for make in (gpipe, one_f_one_b, interleaved, zero_bubble, zbv, lockstep)}
)
"""Maps the name of each kind of schedule to the function that makes it."""


def by_name(
    kind: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None, **options: Any
) -> Schedule:
    """Make a schedule of the kind with this name.

    Args:
      kind: a key of `KINDS`, such as "one_f_one_b".
      num_stages: device stages.
      num_microbatches: microbatches of a step.
      num_chunks: stages of the model per device stage; None: the default of the kind.
      **options: further arguments of the kind, such as `memory` or `forward_only`.

    Returns:
      `KINDS[kind](num_stages, num_microbatches, ...)`.

    Raises:
      ValueError: an unknown kind, or a value that it refuses.
      TypeError: an option that the kind lacks.

    Example:
      >>> by_name("one_f_one_b", 2, 2).orders()
      ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
    if num_chunks is not None:
        options["num_chunks"] = num_chunks
    return KINDS[kind](num_stages, num_microbatches, **options)


_KIND_OF_LETTER: dict[str, Kind] = {letter: kind for kind, letter in TORCH_LETTERS.items()}
_OPERATION = re.compile(r"(\d+)([FIWB])(\d+)")
_OVERLAP = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_Parsed = tuple[Kind, int, int]  # kind, stage of the model, microbatch


@checks_flags("schedules.from_table")
def from_table(
    rows: Sequence[str], *, lockstep: bool = False, name: str = "from_table"
) -> Schedule:
    """Make a schedule from a table in torch's notation, which `Schedule.orders` prints.

    Args:
      rows: one string per device stage, of cells between commas. An empty cell is idle. An
        operation is such as "3I0": stage of the model; F forward, I gradient of the input, W
        gradient of the weights, B both; microbatch. Two that share a column are such as
        "(0F3;3B1)OVERLAP_F_B".
      lockstep: whether the columns are ticks, as in the tables of `lockstep`.
      name: name of the schedule.

    Returns:
      A `Schedule`, whose `orders()` are `rows` again.

    Raises:
      ValueError: an invalid table: other letters, a stage of the model on two device stages, an
        operation that is missing or repeated, a deadlock (the message names the operation).

    Example:
      >>> from_table(["0F0,,,0I0,0W0", ",1F0,1I0,1W0"]).stash
      (1, 1)
    """
    is_text = isinstance(rows, list | tuple) and all(isinstance(row, str) for row in rows)
    if not is_text or not any(row.strip(",") for row in rows):
        raise ValueError(f"`rows` must be strings as `Schedule.orders` returns them, got {rows!r}.")
    parsed = [
        [_read_cell(text, column, stage) for column, text in enumerate(row.split(","))]
        for stage, row in enumerate(rows)
    ]
    placement = _placement(parsed)
    chunk = [placement[:k].count(stage) for k, stage in enumerate(placement)]
    return Schedule(
        name,
        num_stages=len(rows),
        num_microbatches=1 + max(m for row in parsed for cell in row for _, _, m in cell),
        num_chunks=1 + max(chunk),
        placement=placement,
        cells=tuple(
            tuple(tuple(Operation(kind, s, chunk[k], m) for kind, k, m in cell) for cell in row)
            for s, row in enumerate(parsed)
        ),
        lockstep=lockstep,
    )


def _read_cell(text: str, column: int, stage: int) -> list[_Parsed]:
    together = _OVERLAP.fullmatch(text)
    words = together.groups() if together else [text] * bool(text)
    matches = [m for m in map(_OPERATION.fullmatch, words) if m]
    if len(matches) < len(words):
        raise ValueError(
            f"`rows`: column {column} of stage {stage} must be empty or such as 3I0, with F, I, W "
            f"or B, or (0F3;3B1)OVERLAP_F_B, got {text!r}."
        )
    return [(_KIND_OF_LETTER[m[2]], int(m[1]), int(m[3])) for m in matches]


def _placement(rows: Sequence[Sequence[Sequence[_Parsed]]]) -> tuple[int, ...]:
    """Return the device stage of each stage of the model, from the rows that name it."""
    stage_of: dict[int, int] = {}
    for stage, row in enumerate(rows):
        for _, k, _ in (operation for cell in row for operation in cell):
            if stage_of.setdefault(k, stage) != stage:
                both = f"{stage_of[k]} and {stage}"
                raise ValueError(f"`rows`: stage {k} of the model is in two rows, {both}.")
    for k in range(max(stage_of)):
        if k not in stage_of:
            raise ValueError(f"`rows`: no row holds stage {k} of the model.")
    return tuple(stage_of[k] for k in sorted(stage_of))
