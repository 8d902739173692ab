"""A table in lockstep: which operations stages do in the same tick."""

from collections import deque
from itertools import zip_longest

from ._rows import Cell, Needs, Operation, Table, gives, in_torch_letters, needs

Tick = tuple[tuple[Operation, ...], ...]
"""Per device stage its operations of one tick: none, one, or an F and a B (or BW) after it."""


def ticks_of(table: Table) -> tuple[Tick, ...]:
    """The ticks of a table: its columns where they are made for that, or no longer than packed."""
    columns = [tick for tick in _columns(table) if any(tick)]
    if table.lockstep:
        return tuple(_joined(columns))
    packed = _packed(table)
    keep = _too_early(table) is None and _even_time(columns) <= _even_time(packed)
    return tuple(columns if keep else packed)


def check_columns(table: Table) -> None:
    """Raise unless all that an operation needs of other stages stands in an earlier column."""
    found = _too_early(table)
    if found is not None:
        operation, needed = found
        waits = in_torch_letters(operation, table.model_stage(operation))
        raise ValueError(
            f"{table.name}: the columns of a table for lockstep are ticks, but {waits} of stage "
            f"{operation.stage} needs {needed.kind} of microbatch {needed.microbatch} on stage "
            f"{needed.model_stage} of the model, which stands in no earlier column."
        )


def _columns(table: Table) -> list[Tick]:
    return list(zip_longest(*table.cells, fillvalue=()))


def _even_time(ticks: list[Tick]) -> int:
    """How long ticks last where F, B and W take one unit each, and BW two."""
    return sum(max(sum(len(op.kind) for op in cell) for cell in tick) for tick in ticks)


def _too_early(table: Table) -> tuple[Operation, Needs] | None:
    """An operation whose column does not come after that of what another stage gives it."""
    column: dict[Needs, int] = {}
    for row in table.cells:
        for index, cell in enumerate(row):
            column |= {gives(op, table.model_stage(op)): index for op in cell}
    for operation in (op for row in table.rows for op in row if op):
        model_stage = table.model_stage(operation)
        for needed in needs(operation, model_stage, table.num_model_stages):
            elsewhere = table.placement[needed.model_stage] != operation.stage
            if elsewhere and column[needed] >= column[gives(operation, model_stage)]:
                return operation, needed
    return None


def _packed(table: Table) -> list[Tick]:
    """Every cell in the earliest tick that its row and what it needs allow."""
    rows = [deque(cell for cell in row if cell) for row in table.cells]
    made: set[Needs] = set()
    ticks: list[Tick] = []
    while any(rows):
        ready = [len(row) > 0 and _can(table, row[0], made) for row in rows]
        if not any(ready):
            # An F and a B that share a column wait for what the F alone would set off.
            for row in rows:
                if row and _can(table, row[0][:1], made):
                    forward, backward = row.popleft()
                    row.extendleft(((backward,), (forward,)))
            continue
        tick = tuple(row.popleft() if now else () for row, now in zip(rows, ready, strict=True))
        made |= {gives(op, table.model_stage(op)) for cell in tick for op in cell}
        ticks.append(tick)
    return ticks


def _can(table: Table, cell: Cell, made: set[Needs]) -> bool:
    """Whether all is there that `cell` needs of ticks before."""
    own: set[Needs] = set()
    for operation in cell:
        model_stage = table.model_stage(operation)
        wanted = needs(operation, model_stage, table.num_model_stages)
        if not all(needed in made or needed in own for needed in wanted):
            return False
        own.add(gives(operation, model_stage))
    return True


def _joined(ticks: list[Tick]) -> list[Tick]:
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
