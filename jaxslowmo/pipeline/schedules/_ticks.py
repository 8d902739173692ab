"""A table in lockstep: which operations stages do in the same tick."""

from ._operation import Needs, Operation, gives, needs
from ._table import Cell, Table

Tick = tuple[tuple[Operation, ...], ...]
"""Per device stage its operations of one tick: none, one, or an F and a B (or BW) after it."""


def ticks_of(table: Table, in_order: tuple[Operation, ...]) -> tuple[Tick, ...]:
    """The ticks of a table: its columns where those keep the dependencies, else packed."""
    columns = _columns(table) if _columns_keep_order(table) else _packed(table, in_order)
    ticks = [tick for tick in columns if any(tick)]
    return tuple(_fused(ticks) if table.fused else ticks)


def _columns(table: Table) -> list[Tick]:
    width = max(map(len, table.cells))
    rows = [[*row, *[()] * (width - len(row))] for row in table.cells]
    return list(zip(*rows, strict=True))


def _columns_keep_order(table: Table) -> bool:
    """Whether all that an operation needs of other stages stands in an earlier column."""
    column: dict[Needs, int] = {}
    for row in table.cells:
        for index, cell in enumerate(row):
            column |= {gives(op, table.model_stage(op)): index for op in cell}
    return all(
        column[needed] < column[gives(operation, table.model_stage(operation))]
        for row in table.rows
        for operation in filter(None, row)
        for needed in needs(operation, table.model_stage(operation), table.num_model_stages)
        if table.placement[needed.model_stage] != operation.stage
    )


def _packed(table: Table, in_order: tuple[Operation, ...]) -> list[Tick]:
    """Every operation in the earliest tick that its row and what it needs allow."""
    # A backward operation may join the tick of the F whose column it shares.
    joins = {cell[1] for row in table.cells for cell in row if len(cell) > 1}
    ticks: list[list[Cell]] = []
    last = [-1] * table.num_stages
    made: dict[Needs, int] = {}
    for operation in in_order:
        stage, model_stage = operation.stage, table.model_stage(operation)
        tick = last[stage] + (operation not in joins)
        for needed in needs(operation, model_stage, table.num_model_stages):
            if table.placement[needed.model_stage] != stage:
                tick = max(tick, made[needed] + 1)
        last[stage] = made[gives(operation, model_stage)] = tick
        ticks += [[()] * table.num_stages for _ in range(tick + 1 - len(ticks))]
        ticks[tick][stage] += (operation,)
    return [tuple(tick) for tick in ticks]


def _fused(ticks: list[Tick]) -> list[Tick]:
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
