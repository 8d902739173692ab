"""An order of all operations in which none comes before what it needs."""

from ._rows import Needs, Operation, Table, gives, in_torch_letters, needs


def in_order(table: Table) -> list[Operation]:
    """All operations, each after those that it needs and after those before it in its row.

    Raises:
      ValueError: the rows wait for each other; names an operation and what it waits for.
    """
    rows = [[op for op in row if op] for row in table.rows]
    at = [0] * len(rows)
    done: set[Needs] = set()
    order: list[Operation] = []
    waiting: dict[Needs, int] = {}
    ready = list(range(len(rows)))
    while ready:
        stage = ready.pop()
        while at[stage] < len(rows[stage]):
            operation = rows[stage][at[stage]]
            missing = _missing(table, operation, done)
            if missing is not None:
                waiting[missing] = stage
                break
            at[stage] += 1
            order.append(operation)
            made = gives(operation, table.model_stage(operation))
            done.add(made)
            if made in waiting:
                ready.append(waiting.pop(made))
    if waiting:
        raise ValueError(_deadlock(table, waiting, rows, at))
    return order


def _missing(table: Table, operation: Operation, done: set[Needs]) -> Needs | None:
    model_stage = table.model_stage(operation)
    for needed in needs(operation, model_stage, table.num_model_stages):
        if needed not in done:
            return needed
    return None


def _deadlock(
    table: Table, waiting: dict[Needs, int], rows: list[list[Operation]], at: list[int]
) -> str:
    """One stage's operation, what it waits for, and what stands before that."""
    needed, stage = min(waiting.items(), key=lambda item: item[1])
    holder = table.placement[needed.model_stage]
    operation, before = rows[stage][at[stage]], rows[holder][at[holder]]
    waits, blocks = (in_torch_letters(op, table.model_stage(op)) for op in (operation, before))
    what = next(
        in_torch_letters(op, needed.model_stage)
        for op in rows[holder]
        if gives(op, table.model_stage(op)) == needed
    )
    behind = f"behind {waits} itself" if holder == stage else f"behind {blocks}, which waits, too"
    return (
        f"{table.name}: the table deadlocks: stage {stage} waits at {waits} for {what}, which "
        f"stands on stage {holder} {behind}."
    )
