"""The output of commands: readable numbers, sentences, progress, tables, JSON."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn, track
from rich.table import Table

from .._support.files import write_anew

_LINES = 10  # progress lines of a run whose output is no terminal


def format_count(count: float | None, unit: str = "") -> str:
    """Return three digits and a decimal prefix: 999, 1.07M, 1.50 MB; a dash for None."""
    if count is None:
        return "-"
    digits, prefix = f"{count:.0f}", ""
    if count >= 999.5:
        digits, power = Decimal(f"{count:.2e}").to_eng_string().split("E+")
        prefix = "kMGTPE"[int(power) // 3 - 1]
    return f"{digits}{' ' if unit else ''}{prefix}{unit}"


def format_bytes(count: float | None) -> str:
    """Return bytes in decimal units with three digits: 0 B, 999 B, 1.50 MB; a dash for None."""
    return format_count(count, "B")


def format_loss(loss: float | None) -> str:
    """Return a loss with three decimals; a dash for None, NaN and infinities."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.3f}"


def write_json(path: Path, value: Any) -> None:
    """Write values, and dataclasses in them, as JSON; NaN becomes null."""
    write_anew(path, json.dumps(_plain(value), indent=2) + "\n")


def json_line(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_plain(record)) + "\n"


def _plain(value: Any) -> Any:
    def default(x: Any) -> Any:
        return vars(x) if dataclasses.is_dataclass(x) else str(x)

    return json.loads(json.dumps(value, default=default), parse_constant=lambda _: None)


def say(console: Console, *sentences: str) -> None:
    """Print each sentence on its own line, without colours; the terminal wraps long lines."""
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


def tracked(
    items: Iterable[Any], what: str, console: Console, total: int | None = None
) -> Iterable[Any]:
    """Yield the items; a terminal shows meanwhile what is done, and how many of them are left."""
    return track(
        items, what, total, console=console, transient=True, disable=not console.is_terminal
    )


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
            "[bold]{task.description}",
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            "{task.fields[status]}",
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
        step, latest = record["step"], self._latest
        latest.update((name, value) for name, value in record.items() if value is not None)
        if "validation_loss" in record:
            self._evaluated = step
        # An evaluation of an earlier step is shown with its step.
        when = "" if step == self._evaluated else f" (step {self._evaluated})"
        texts: dict[str, Callable[[float], str]] = {
            "loss": lambda loss: f"loss {format_loss(loss)}",
            "validation_loss": lambda loss: f"validation {format_loss(loss)}{when}",
            "tokens_per_second": lambda speed: f"{format_count(speed)} tokens/s",
            "bytes_sent": lambda count: f"{self._verb} {format_bytes(count)}",
        }
        status = "  ".join(text(latest[name]) for name, text in texts.items() if name in latest)
        self._progress.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step >= self._next_line or step == self._steps):
            self._next_line = step + self._steps / _LINES
            self.say(f"{self._label}: {step:{len(str(self._steps))}}/{self._steps}  {status}")


def facts_table(facts: Mapping[str, str], title: str) -> Table:
    """Return a table with a line per entry."""
    table = Table(show_header=False, title=title, title_justify="left")
    for row in facts.items():
        table.add_row(*row)
    return table


def table_of(rows: Iterable[Mapping[str, str]], **options: Any) -> Table:
    """Return a table with a line per row, and a column per name of the first row.

    Args:
      rows: texts of the cells; those of the first column stand to the left, others to the right.
      **options: those of `rich.table.Table`.
    """
    rows = list(rows)
    table = Table(title_justify="left", caption_justify="left", **options)
    for name in rows[0]:
        is_first = not table.columns
        # Settings of algorithms make long names in the first column.
        table.add_column(
            name, justify="left" if is_first else "right", no_wrap=not is_first, overflow="fold"
        )
    for row in rows:
        table.add_row(*row.values())
    return table


def run_table(summary: dict[str, Any]) -> Table:
    """Return a table of one run: a line per number."""
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
    facts["tokens/s, all replicas"] = format_count(summary["tokens_per_second"])
    facts["seconds"] = f"{summary['seconds']:.1f}"
    return facts_table(facts, title=f"{summary['algorithm']}: {summary['status']}")
