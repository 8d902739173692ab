"""The output of commands: readable numbers, sentences, progress, tables, JSON."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from .._support.files import write_anew

_LINES = 10  # progress lines of a run whose output is no terminal


def format_bytes(count: float) -> str:
    """Return bytes in decimal units with three digits: 0 B, 999 B, 1.50 MB."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Return a count as three digits and a letter: 999, 1.07M."""
    return _scaled(count, ("", "k", "M", "G", "T")).replace(" ", "")


def format_loss(loss: float | None) -> str:
    """Return a loss with three decimals; a dash for None, NaN and infinities."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.3f}"


def format_limit(limit: int) -> str:
    """Return a bucket limit in bytes as users write it: per leaf (0), 1.5 MiB, 4,000 B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit >= size and limit * 100 % size == 0:
            return f"{limit / size:g} {unit}"
    return f"{limit:,} B" if limit else "per leaf"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    step = 0
    # 999.5 and more would print as 1e+03.
    while count >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    digits = 0 if step == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[step]}"


def write_json(path: Path, value: Any) -> None:
    """Write values, and dataclasses in them, as JSON; NaN becomes null."""
    write_anew(path, json.dumps(_plain(value), indent=2, default=str) + "\n")


def json_line(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_plain(record)) + "\n"


def say(console: Console, *sentences: str) -> None:
    """Print each sentence on its own line, without colours; the terminal wraps long lines."""
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """A context that shows the progress of one run.

    Args:
      console: console to which it writes.
      label: name of the run, such as "slowmo, seed 0".
      steps: number of steps of the run.
      would: whether bytes are only what the run would send (virtual replicas).
    """

    def __init__(self, console: Console, label: str, steps: int, *, would: bool = False):
        self._console, self._label, self._steps = console, label, steps
        self._verb = "would send" if would else "sent"
        self._latest: dict[str, Any] = {}
        self._evaluated = 0  # the last step with an evaluation
        self._next_line = 0.0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=steps, status="compiling")

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, *sentences: str) -> None:
        """Print sentences for the user between progress lines."""
        say(self._console, *sentences)

    def advance(self, step: int) -> None:
        """Show that a step without a record is done."""
        self._progress.update(self._task, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of a step."""
        values = {name: value for name, value in record.items() if value is not None}
        self._latest.update(values)
        step = record["step"]
        if "validation_loss" in record:
            self._evaluated = step
        self._progress.update(self._task, completed=step, status=self._status(step))
        if not self._console.is_terminal and (step >= self._next_line or step == self._steps):
            self._next_line = step + self._steps / _LINES
            width = len(str(self._steps))
            say(self._console, f"{self._label}: {step:{width}}/{self._steps}  {self._status(step)}")

    def _status(self, step: int) -> str:
        # An evaluation of an earlier step is shown with its step.
        when = "" if step == self._evaluated else f" (step {self._evaluated})"
        texts: dict[str, Callable[[float], str]] = {
            "loss": lambda loss: f"loss {format_loss(loss)}",
            "validation_loss": lambda loss: f"validation {format_loss(loss)}{when}",
            "tokens_per_second": lambda speed: f"{format_count(speed)} tokens/s",
            "bytes_sent": lambda count: f"{self._verb} {format_bytes(count)}",
        }
        parts = (text(self._latest[name]) for name, text in texts.items() if name in self._latest)
        return "  ".join(parts)


def facts_table(facts: Mapping[str, str], title: str) -> Table:
    """Return a table with a line per entry."""
    return numbers_table(None, (), facts.items(), show_header=False, title=title)


def numbers_table(
    first: str | Column | None,
    names: Iterable[str],
    rows: Iterable[Iterable[str]],
    **options: Any,
) -> Table:
    """Return a table: a first column, and columns of numbers with these names.

    Args:
      first: the first column, or its name; None: no column has a name.
      names: names of the columns of numbers.
      rows: texts of the cells, row by row.
      **options: those of `rich.table.Table`.
    """
    numbers = [Column(name, justify="right", no_wrap=True) for name in names]
    columns = numbers if first is None else [first, *numbers]
    table = Table(*columns, title_justify="left", caption_justify="left", **options)
    for row in rows:
        table.add_row(*row)
    return table


def run_table(summary: dict[str, Any]) -> Table:
    """Return a table of one run: a line per number."""
    speed = summary["tokens_per_second"]
    verb = "would be sent" if summary["bytes_are_hypothetical"] else "sent"
    facts = {
        "steps": str(summary["steps"]),
        "parameters": format_count(summary["parameters"]),
        "training loss, nats/byte": format_loss(summary["loss"]),
        "validation loss of the consensus, nats/byte": format_loss(summary["validation_loss"]),
        f"bytes {verb} per replica": format_bytes(summary["bytes_sent"]),
    }
    for kind, count in summary["bytes_per_step_by_kind"].items():
        facts[f"  in a step of kind {kind}"] = format_bytes(count)
    if "loss_scale" in summary:
        facts["scale of the loss"] = f"{summary['loss_scale']:g}"
        facts["updates skipped, all replicas"] = str(summary["skipped_updates"])
    facts["tokens/s, all replicas"] = "-" if speed is None else format_count(speed)
    facts["seconds"] = f"{summary['seconds']:.1f}"
    return facts_table(facts, title=f"{summary['algorithm']}: {summary['status']}")


def compare_rows(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per algorithm, in the order of first appearance.

    Returns:
      Dicts with `algorithm`, `seeds`, `validation_loss` (mean over the seeds that finished, None
      without any), `spread` (largest minus smallest, None below two), `bytes_sent` (mean), `ratio`
      (to the first row's bytes), `tokens_per_second` (mean), `diverged` (number of seeds).
    """
    rows: list[dict[str, Any]] = []
    for algorithm in dict.fromkeys(run["algorithm"] for run in summaries):
        runs = [run for run in summaries if run["algorithm"] == algorithm]
        done = [run for run in runs if run["status"] == "finished"]
        losses = [run["validation_loss"] for run in done]
        speeds = [run["tokens_per_second"] for run in done if run["tokens_per_second"]]
        row: dict[str, Any] = {"algorithm": algorithm, "seeds": [run["seed"] for run in done]}
        row["validation_loss"] = statistics.fmean(losses) if losses else None
        row["spread"] = max(losses) - min(losses) if len(losses) > 1 else None
        row["bytes_sent"] = statistics.fmean(run["bytes_sent"] for run in done) if done else None
        first = (rows or [row])[0]["bytes_sent"]
        row["ratio"] = row["bytes_sent"] / first if done and first else None
        row["tokens_per_second"] = statistics.fmean(speeds) if speeds else None
        row["diverged"] = sum(run["status"] == "diverged" for run in runs)
        rows.append(row)
    return rows


def compare_table(rows: Sequence[dict[str, Any]], *, would: bool) -> Table:
    """Return a table of the rows of `compare_rows`."""
    texts: dict[str, Callable[[float], str]] = {
        "spread": format_loss,
        "bytes_sent": format_bytes,
        "ratio": lambda ratio: f"{100 * ratio:.3g} %",
        "tokens_per_second": format_count,
    }

    def cells(row: dict[str, Any]) -> list[str]:
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        loss = format_loss(row["validation_loss"]) + diverged
        numbers = ("-" if row[x] is None else text(row[x]) for x, text in texts.items())
        return [row["algorithm"], loss, *numbers]

    first = rows[0]["algorithm"] if rows else ""
    sent = "that a replica would send" if would else "sent per replica"
    caption = f"validation loss: nats per byte, consensus model; bytes {sent}"
    names = ("validation", "spread", "bytes", f"of {first}", "tokens/s")
    # Settings make long names.
    column = Column("algorithm", overflow="fold")
    return numbers_table(column, names, map(cells, rows), caption=caption)
