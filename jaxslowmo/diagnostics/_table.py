"""The text form of a communication report."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._report import CommReport, CommRow

_NUMBERS = 4  # the last columns before the notes are numbers, aligned to the right


def table(report: "CommReport") -> str:
    """An aligned table, one line for each kind, axis and collective, both levels side by side."""
    head = ["kind", "axis", "collective", "emitted", "bytes", "compiled", "bytes", "notes"]
    lines = [head]
    for kind in report.kinds:
        groups: dict[tuple[str, str], list[CommRow]] = {}
        for row in report.rows:
            if row.kind == kind:
                groups.setdefault((row.axis, row.collective), []).append(row)
        if not groups:
            lines.append([kind, "-", "(no communication)", *_amounts(report, []), ""])
        for (axis, collective), rows in groups.items():
            lines.append([kind, axis, collective, *_amounts(report, rows), _notes(rows)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _amounts(report: "CommReport", rows: "list[CommRow]") -> list[str]:
    cells = []
    for level in ("emitted", "compiled"):
        if level not in report.levels:
            cells += ["-", "-"]
            continue
        chosen = [row for row in rows if row.level == level]
        cells.append(f"{sum(row.count for row in chosen):,}")
        cells.append(f"{sum(row.bytes for row in chosen):,}")
    return cells


def _notes(rows: "list[CommRow]") -> str:
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
