"""Whether a table is whole: every operation once, on the stage that holds it."""

from collections import Counter

from ._rows import KINDS_OF_OPERATION, Cell, Operation, Table
from ._sizes import as_sizes


def check_sizes(table: Table) -> None:
    """Raise unless sizes, placement and the number of rows belong together."""
    num_stages, _, num_chunks = as_sizes(table.num_stages, table.num_microbatches, table.num_chunks)
    held = Counter(table.placement)
    if held != dict.fromkeys(range(num_stages), num_chunks):
        raise ValueError(
            f"`placement` must name each of {num_stages} device stages {num_chunks} times, got "
            f"{table.placement!r}."
        )
    if len(table.cells) != num_stages:
        raise ValueError(f"`cells` must hold {num_stages} rows, got {len(table.cells)}.")


def check_cells(table: Table) -> None:
    """Raise unless every operation stands once, in the row of its stage."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for stage, row in enumerate(table.cells):
        for cell in row:
            _check_cell(table, stage, cell)
            for operation in cell:
                model_stage = table.model_stage(operation)
                seen.update((kind, model_stage, operation.microbatch) for kind in operation.kind)
    kinds = "FBW" if any(kind != "F" for kind, _, _ in seen) else "F"
    for model_stage in range(table.num_model_stages):
        for microbatch in range(table.num_microbatches):
            for kind in kinds:
                count = seen[kind, model_stage, microbatch]
                if count != 1:
                    raise ValueError(
                        f"{table.name}: {_WHAT[kind]} of microbatch {microbatch} on stage "
                        f"{model_stage} of the model must stand in the table once, not {count} "
                        "times."
                    )


_WHAT = {"F": "the forward pass (F)", "B": "the gradient of the input (I or B)"} | {
    "W": "the gradient of the weights (W or B)"
}


def _check_cell(table: Table, stage: int, cell: Cell) -> None:
    kinds = [operation.kind for operation in cell]
    if len(kinds) > 2 or (len(kinds) == 2 and not (kinds[0] == "F" and kinds[1] in ("B", "BW"))):
        raise ValueError(
            f"{table.name}: operations that share a column must be an F and a B or BW after it, "
            f"got {kinds} on stage {stage}."
        )
    for operation in cell:
        if operation.kind not in KINDS_OF_OPERATION:
            raise ValueError(
                f"{table.name}: unknown kind {operation.kind!r} of {operation}; the kinds are "
                f"{', '.join(KINDS_OF_OPERATION)}."
            )
        if operation.stage != stage:
            raise ValueError(
                f"{table.name}: the row of stage {stage} holds an operation of stage "
                f"{operation.stage}: {operation}."
            )
        _check_numbers(table, operation)


def _check_numbers(table: Table, operation: Operation) -> None:
    for name, most in (("chunk", table.num_chunks), ("microbatch", table.num_microbatches)):
        if not 0 <= getattr(operation, name) < most:
            raise ValueError(f"{table.name}: `{name}` must be in 0 .. {most - 1}, got {operation}.")
