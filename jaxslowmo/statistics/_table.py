"""The text form of a step report."""

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._report import StepReport
    from ._times import StepTimes

_MIB = 2**20


def table(report: "StepReport") -> str:
    """Times of the last measured step and their means, then kinds of step, then buckets."""
    measured = _ranges(report.measured) or "none"
    lines = [
        f"{report.iteration} steps, measured: {measured}; {report.num_devices} {report.backend} "
        f"devices",
    ]
    if report.missed:
        lines.append(f"due but not measured: {_ranges(report.missed)}")
    if report.last is not None and report.average is not None:
        lines += ["", *_aligned(_times(report.last, report.average))]
    if report.kinds:
        lines += ["", *_aligned(_kinds(report))]
    lines += ["", *_model(report)]
    return "\n".join(lines)


def _times(last: "StepTimes", average: "StepTimes") -> list[list[str]]:
    rows = [["ms", "last", "mean"]]
    for name, text in (
        ("step_time", "step"),
        ("forward_compute_time", "forward compute"),
        ("backward_compute_time", "backward compute"),
        ("other_compute_time", "other compute"),
        ("communication_time", "communication"),
        ("overlap_time", "  while computing"),
        ("exposed_communication_time", "  exposed"),
    ):
        rows.append([text, _ms(getattr(last, name)), _ms(getattr(average, name))])
    for name in average.communication:
        one, mean = last.communication.get(name, 0.0), average.communication[name]
        rows.append([f"  of {name}", _ms(one), _ms(mean)])
    return rows


def _kinds(report: "StepReport") -> list[list[str]]:
    rows = [["kind of step", "steps", "measured", "step, ms", "communication", "exposed"]]
    for name, kind in report.kinds.items():
        times = kind.times
        cells = [times.step_time, times.communication_time, times.exposed_communication_time]
        shown = [_ms(cell) for cell in cells] if kind.measured else ["-", "-", "-"]
        rows.append([name, str(kind.steps), str(kind.measured), *shown])
    return rows


def _model(report: "StepReport") -> list[str]:
    lines = [
        f"{report.num_parameter_tensors} parameters, {_mib(report.parameter_bytes)}, "
        f"{', '.join(report.dtypes) or 'no dtype'}"
    ]
    exchanges = dict.fromkeys(b.exchange for b in (*report.buckets, *report.sync_buckets))
    for exchange in exchanges:
        found = [b for b in (*report.buckets, *report.sync_buckets) if b.exchange == exchange]
        sizes = [_mib(bucket.size_bytes) for bucket in found]
        runs = [(size, len(list(same))) for size, same in groupby(sizes)]
        shown = ", ".join(size if count == 1 else f"{count} x {size}" for size, count in runs)
        lines.append(f"buckets of {exchange}: {shown}")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _mib(size: int) -> str:
    return f"{size / _MIB:.3g} MiB" if size >= _MIB / 100 else f"{size} B"


def _ranges(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
