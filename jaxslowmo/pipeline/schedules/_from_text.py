"""Make a schedule from the name of its kind, from torch's notation, or from operations."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ._basic import gpipe, one_f_one_b, round_robin
from ._interleaved import interleaved
from ._lockstep import lockstep
from ._operations import TORCH_LETTERS, Cell, Operation
from ._schedule import Schedule
from ._zbv import zbv
from ._zero_bubble import zero_bubble

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
      ValueError: an unknown kind, an option that the kind lacks, or a value that it refuses.

    Example:
      >>> by_name("one_f_one_b", 2, 2).orders()
      ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of schedule {kind!r}; the kinds are {', '.join(KINDS)}.")
    if num_chunks is not None:
        options = {"num_chunks": num_chunks, **options}
    parameters = list(inspect.signature(KINDS[kind]).parameters)[2:]
    unknown = [option for option in options if option not in parameters]
    if unknown:
        raise ValueError(f"{kind} has no option {_listed(unknown)}; it has {_listed(parameters)}.")
    return KINDS[kind](num_stages, num_microbatches, **options)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_KINDS = {letter: kind for kind, letter in TORCH_LETTERS.items()}
_OPERATION = re.compile(r"(\d+)([FIWB])(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_ParsedOperation = tuple[Any, int, int]  # kind, stage of the model, microbatch


def from_table(
    rows: Iterable[str | Iterable[str | Operation | Iterable[Operation] | None]],
    *,
    placement: Sequence[int] | None = None,
    lockstep: bool = False,
    name: str = "from_table",
) -> Schedule:
    """Make a schedule from a table, in torch's notation or of operations.

    Args:
      rows: one row per device stage, in one of three forms. (1) Strings as `Schedule.orders` and
        `torch.distributed.pipelining` write them: cells between commas; an empty cell is idle; an
        operation is such as "3I0" (stage of the model; F forward, I gradient of the input, W
        gradient of the weights, B both; microbatch); two that share a column are such as
        "(0F3;3B1)OVERLAP_F_B". (2) Sequences of such cells, as `csv.reader` makes them.
        (3) Sequences whose cells are an `Operation`, a sequence of them, or None.
      placement: the device stage of each stage of the model. Strings already determine it; for
        operations None puts stage k of the model on device stage k % p.
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
    if isinstance(rows, str):
        raise ValueError(f"`rows` must be one string per device stage, got the string {rows!r}.")
    if not isinstance(rows, Iterable) or isinstance(rows, bytes):
        raise ValueError(f"`rows` must hold one row per device stage, got {rows!r}.")
    row_list: list[Any] = [_joined(row) for row in rows]
    if not row_list:
        raise ValueError("`rows` must hold one row per device stage, got none.")
    if all(isinstance(row, str) for row in row_list):
        parsed = [_read_row(stage, row) for stage, row in enumerate(row_list)]
        stage_of = _placement(parsed)
        if placement is not None and tuple(placement) != stage_of:
            raise ValueError(f"`placement` is {tuple(placement)}, but the rows hold {stage_of}.")
        placement = stage_of
        chunk = {k: stage_of[:k].count(stage) for k, stage in enumerate(stage_of)}
        cells = tuple(
            tuple(tuple(Operation(kind, s, chunk[k], j) for kind, k, j in cell) for cell in row)
            for s, row in enumerate(parsed)
        )
    elif any(isinstance(row, str) for row in row_list):
        raise ValueError("`rows` must all be strings or all be sequences of operations.")
    else:
        cells = tuple(tuple(map(_cell, row)) for row in row_list)
    operations = [operation for row in cells for cell in row for operation in cell]
    if not operations:
        raise ValueError("`rows` must hold operations, got idle columns only.")
    num_chunks = 1 + max(operation.chunk for operation in operations)
    return Schedule(
        name,
        num_stages=len(cells),
        num_microbatches=1 + max(operation.microbatch for operation in operations),
        num_chunks=num_chunks,
        placement=tuple(placement) if placement else round_robin(len(cells), num_chunks),
        cells=cells,
        lockstep=lockstep,
    )


def _joined(row: Any) -> Any:
    """Return a row of strings as one string, any other row as a list."""
    if isinstance(row, str):
        return row
    if not isinstance(row, Iterable) or isinstance(row, bytes):
        raise ValueError(
            f"`rows`: a row must be a string or a sequence of operations, got {row!r}."
        )
    cells = list(row)
    if any(isinstance(cell, str) for cell in cells) and all(
        cell is None or isinstance(cell, str) for cell in cells
    ):
        return ",".join(cell or "" for cell in cells)
    return cells


def _read_row(stage: int, row: str) -> list[list[_ParsedOperation]]:
    cells = []
    for column, text in enumerate(row.split(",")):
        text = text.strip()
        together = _OVERLAP.fullmatch(text)
        words = together[1].split(";") if together else [text] * bool(text)
        matches = [_OPERATION.fullmatch(word) for word in words]
        if not all(matches):
            raise ValueError(
                f"`rows`: {text!r} in column {column} of stage {stage} is no operation: stage of "
                "the model, one of F, I, W, B, microbatch, as 3I0; two as (0F3;3B1)OVERLAP_F_B."
            )
        cells.append([(_KINDS[m[2]], int(m[1]), int(m[3])) for m in matches if m])
    return cells


def _placement(rows: list[list[list[_ParsedOperation]]]) -> tuple[int, ...]:
    """Return the device stage of each stage of the model, from the rows that name it."""
    stage_of: dict[int, int] = {}
    for stage, row in enumerate(rows):
        for _, model_stage, _ in (operation for cell in row for operation in cell):
            if stage_of.setdefault(model_stage, stage) != stage:
                raise ValueError(
                    f"`rows`: stage {model_stage} of the model is in the rows of stages "
                    f"{stage_of[model_stage]} and {stage}; one of them must hold all of it."
                )
    missing = sorted(set(range(max(stage_of, default=-1) + 1)) - set(stage_of))
    if missing:
        raise ValueError(f"`rows`: no row holds stage {missing[0]} of the model.")
    return tuple(stage_of[model_stage] for model_stage in sorted(stage_of))


def _cell(value: Any) -> Cell:
    if value is None:
        return ()
    if isinstance(value, Operation):
        return (value,)
    cell = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(operation, Operation) for operation in cell):
        raise ValueError(
            f"`rows`: a cell must be an Operation, a sequence of them or None, got {value!r}."
        )
    return cell
