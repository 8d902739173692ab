"""The files of a run: its configuration, its metrics as they come, its summary."""

from pathlib import Path
from types import TracebackType
from typing import Any

import jaxslowmo as js

from ._config import TrainConfig
from ._output import JsonLines, read_json_lines, write_json


class RunFiles:
    """Context in which `write_record` adds to metrics.jsonl.

    Args:
        folder: of the run.
        config: written to config.json.
        writes: False for a process that leaves all this to another.
        after: step that the run goes on from; later records, which an interrupted run may have
            left, are dropped. 0 drops all.

    Attributes:
        records: those that were there before.
    """

    def __init__(self, folder: Path, config: TrainConfig, *, writes: bool, after: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._folder, self._writes = folder, writes
        self._metrics: JsonLines | None = None
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        before = read_json_lines(folder / "metrics.jsonl") if after else []
        self.records = [record for record in before if record["step"] <= after]
        self._metrics = JsonLines(folder / "metrics.jsonl", self.records)

    def write_record(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.write(record)

    def finish(self, summary: dict[str, Any], statistics: js.StepReport | None) -> None:
        """Writes summary.json, and statistics.json if there are any."""
        if not self._writes:
            return
        write_json(self._folder / "summary.json", summary)
        if statistics:
            statistics.write(self._folder / "statistics.json")

    def __enter__(self) -> "RunFiles":
        if self._metrics is not None:
            self._metrics.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.__exit__(kind, error, traceback)
