"""The result of `comm_report`: its rows, their sums, and their text."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict, Unpack

from ._collectives import COLLECTIVES

LEVELS = ("emitted", "compiled")


@dataclass(frozen=True)
class CommRow:
    """A row of a `CommReport`: one sort of collective in one kind of step.

    Attributes:
      kind: kind of step; kinds overlap, see `comm_report`.
      axis: mesh axis, or axes in mesh order joined by ","; "?" if the device groups are those of no
        set of axes.
      collective: "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
        "ragged-all-to-all", "collective-broadcast"; between TPU slices "send" and "recv".
      level: "emitted" (StableHLO, what the program asks for) or "compiled" (optimised HLO, what
        runs).
      count: number of executions in one step; a combined one (several arrays) counts once.
      bytes: payload of one participating device, the whole logical buffer: the operands of an
        all-reduce, permute, all-to-all, broadcast, send; the full operand of a reduce-scatter; the
        full result of an all-gather or a recv. It is multiplied by `count`, like `wire_bytes`.
      wire_bytes: bytes that one device sends when the collective runs as a ring over
        n = `group_size` devices: 2 (n-1)/n of `bytes` for an all-reduce, (n-1)/n for a
        reduce-scatter, all-gather or all-to-all; all of them for a broadcast, or for a permute in
        which every device sends (the mean over devices where some do not); 0 for a recv.
      group_size: devices that take part together; 0 if unknown. For a permute the size of the axis.
      dtypes: element types on the wire, by their jax names.
      conditional: whether the collective is in a branch of a conditional.
      in_loop: whether the collective is in a loop.
      trip_count: how often the loops around it run it (already in `count`); 1 outside loops; None
        if the program does not say so; then it is counted once.
    """

    kind: str
    axis: str
    collective: str
    level: str
    count: int
    bytes: int
    wire_bytes: int
    group_size: int
    dtypes: tuple[str, ...]
    conditional: bool = False
    in_loop: bool = False
    trip_count: int | None = 1


class RowFilter(TypedDict, total=False):
    """The keyword arguments that select rows; see `CommReport.select`."""

    axis: str | Sequence[str] | None
    collective: str | None
    kind: str | None


@dataclass(frozen=True)
class CommReport:
    """The communication of a step; `str(report)` is a table.

    Attributes:
      rows: the rows by kind and level; only collectives that move something have one. Collectives
        that do not depend on each other may have any order.
      kinds: kinds of step, also those that communicate nothing.
      axes: mesh axes of the program, then combinations of them that occur, then "?" if it occurs.
      levels: ("emitted", "compiled"), or only the first if nothing was compiled: on request, or
        because the program was traced for an abstract mesh; only the second of programs that were
        compiled already.
      state: a text that says whether the state of `sync` is sharded or whole, and why; ""
        if every replica has all of it in any case, or the report is not on a step.
    """

    rows: tuple[CommRow, ...]
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    levels: tuple[str, ...] = LEVELS
    state: str = ""

    def select(
        self,
        *,
        axis: str | Sequence[str] | None = None,
        collective: str | None = None,
        kind: str | None = None,
        level: str | None = None,
    ) -> tuple[CommRow, ...]:
        """Return the rows that match every condition.

        Args:
          axis: an axis, or several (a sequence, or a string joined by ","). Rows that run over
            other axes *as well* match too, so a count of 0 for "replica" covers them. "?" is always
            allowed and matches what could not be attributed to axes.
          collective: name of a collective.
          kind: one of `kinds`, the events of a combined one in any order; None takes all, which
            overlap.
          level: "emitted" or "compiled"; None takes both.

        Returns:
          The rows, in the order of `rows`.

        Raises:
          ValueError: a name that the report does not have; the error lists those that it has.
        """
        if kind is not None:
            events = sorted(kind.split("+"))
            kind = next((k for k in self.kinds if sorted(k.split("+")) == events), kind)
        _check("kind", kind, self.kinds)
        _check("collective", collective, COLLECTIVES)
        _check("level", level, self.levels)
        axes = axis.split(",") if isinstance(axis, str) else list(axis or ())
        for name in axes:
            _check("axis", name, ["?", *",".join(self.axes).split(",")])
        return tuple(
            row
            for row in self.rows
            if set(axes) <= set(row.axis.split(","))
            and collective in (None, row.collective)
            and kind in (None, row.kind)
            and level in (None, row.level)
        )

    def count(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the number of collectives that a step executes.

        Args:
          level: "emitted" or "compiled".
          **which: `axis` and `collective` as in `select`, and `kind`, which may be left out only if
            the report has a single one.

        Returns:
          The sum of `count` over the matching rows.

        Raises:
          ValueError: an unknown name, or no kind although there are several (kinds overlap, so a
            sum over them would count twice).

        Example:
          `assert report.count(kind="local", axis="replica") == 0`
        """
        return sum(row.count for row in self._select_kind(level, which))

    def bytes(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the payload bytes of one device in a step; the arguments are those of `count`."""
        return sum(row.bytes for row in self._select_kind(level, which))

    def wire_bytes(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the bytes that one device sends in a step; the arguments are those of `count`."""
        return sum(row.wire_bytes for row in self._select_kind(level, which))

    def to_json(self) -> str:
        """Return the report as a JSON object with the attributes as keys."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        table = _table(self.kinds, self.levels, self.rows)
        return f"{table}\nstate of `sync`: {self.state}" if self.state else table

    def _select_kind(self, level: str, which: RowFilter) -> tuple[CommRow, ...]:
        if which.get("kind") is None and len(self.kinds) > 1:
            raise ValueError(
                "`kind` is needed: kinds of step overlap, so their sum would count twice. "
                f"This report has {_quote_names(self.kinds)}."
            )
        return self.select(level=level, **which)


def _check(argument: str, value: str | None, names: Sequence[str]) -> None:
    if value is not None and value not in names:
        raise ValueError(f"`{argument}` must be one of {_quote_names(names)}, got {value!r}.")


def _quote_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "(none)"


def _table(kinds: Sequence[str], levels: Sequence[str], rows: Sequence[CommRow]) -> str:
    """Return a table with a line for each kind, axis and collective, both levels side by side."""
    lines = [["kind", "axis", "collective", "emitted", "bytes", "compiled", "bytes", "notes"]]
    for kind in kinds:
        of_kind = [row for row in rows if row.kind == kind]
        pairs = dict.fromkeys((row.axis, row.collective) for row in of_kind)
        for pair in pairs or [("-", "(no communication)")]:
            same = [row for row in of_kind if (row.axis, row.collective) == pair]
            cells: list[str] = []
            for level in LEVELS:
                chosen = [row for row in same if row.level == level]
                amounts = sum(row.count for row in chosen), sum(row.bytes for row in chosen)
                cells += [f"{amount:,}" if level in levels else "-" for amount in amounts]
            lines.append([kind, *pair, *cells, _notes(same)])
    return "\n".join(align_columns(lines, left=(0, 1, 2, 7)))


def _notes(rows: list[CommRow]) -> str:
    notes = ["conditional"] if any(row.conditional for row in rows) else []
    if any(row.trip_count is None for row in rows):
        notes.append("loop of unknown length, counted once")
    elif any(row.in_loop for row in rows):
        notes.append("loop")
    return ", ".join(notes)


def align_columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table, whose cells stand to the right but in the columns `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
