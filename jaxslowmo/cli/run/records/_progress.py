"""Progress of a run: a bar on a terminal, a line now and then elsewhere."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..._output import say
from ..._units import format_bytes, format_count, format_loss

_LINES = 10  # of a run without a terminal


class Reporter:
    """Shows the steps of one run; a context.

    Args:
      console: where to write.
      label: of the run, such as "slowmo, seed 0".
      steps: of the run.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, *sentences: str) -> None:
        """Something that a reader should know beside the progress."""
        say(self._console, *sentences)

    def advance(self, step: int) -> None:
        """A step without a record is done."""
        self._progress.update(self._task, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """A record was made."""
        known = {name: value for name, value in record.items() if value is not None}
        self._latest.update(known)
        step = record["step"]
        if "validation_loss" in record:
            self._evaluated = step
        self._progress.update(self._task, completed=step, status=self._status(step))
        if not self._console.is_terminal and (step >= self._next_line or step == self._steps):
            self._next_line = step + self._steps / _LINES
            width = len(str(self._steps))
            say(self._console, f"{self._label}: {step:{width}}/{self._steps}  {self._status(step)}")

    def _status(self, step: int) -> str:
        latest = self._latest
        # An evaluation of some steps ago must not look like one of now.
        when = "" if step == self._evaluated else f" (step {self._evaluated})"
        parts = [
            f"loss {format_loss(latest['loss'])}" if "loss" in latest else "",
            f"validation {format_loss(latest['validation_loss'])}{when}"
            if "validation_loss" in latest
            else "",
            f"{format_count(latest['tokens_per_second'])} tokens/s"
            if "tokens_per_second" in latest
            else "",
            f"{self._verb} {format_bytes(latest['bytes_sent'])}",
        ]
        return "  ".join(part for part in parts if part)
