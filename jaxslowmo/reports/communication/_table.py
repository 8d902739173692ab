"""The text form of a communication report."""

from collections.abc import Sequence

from ._rows import LEVELS, CommRow

_NUMBERS = 4  # the last columns before the notes are numbers, aligned to the right


def table(kinds: Sequence[str], levels: Sequence[str], rows: Sequence[CommRow]) -> str:
    """An aligned table, one line for each kind, axis and collective, both levels side by side."""
    head = ["kind", "axis", "collective", "emitted", "bytes", "compiled", "bytes", "notes"]
    lines = [head]
    for kind in kinds:
        groups: dict[tuple[str, str], list[CommRow]] = {}
        for row in rows:
            if row.kind == kind:
                groups.setdefault((row.axis, row.collective), []).append(row)
        if not groups:
            lines.append([kind, "-", "(no communication)", *_amounts(levels, []), ""])
        for (axis, collective), found in groups.items():
            lines.append([kind, axis, collective, *_amounts(levels, found), _notes(found)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _amounts(levels: Sequence[str], rows: list[CommRow]) -> list[str]:
    cells = []
    for level in LEVELS:
        if level not in levels:
            cells += ["-", "-"]
            continue
        chosen = [row for row in rows if row.level == level]
        cells.append(f"{sum(row.count for row in chosen):,}")
        cells.append(f"{sum(row.bytes for row in chosen):,}")
    return cells


def _notes(rows: list[CommRow]) -> str:
    notes = []
    if any(row.conditional for row in rows):
        notes.append("conditional")
    if any(row.trip_count is None for row in rows):
        notes.append("loop of unknown length, counted once")
    elif any(row.in_loop for row in rows):
        notes.append("loop")
    return ", ".join(notes)


def _aligned(line: list[str], widths: list[int]) -> str:
    first_number = len(line) - 1 - _NUMBERS
    cells = [
        cell.rjust(width) if first_number <= column < len(line) - 1 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
