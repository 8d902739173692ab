"""The files of a run: its configuration, its metrics as they come, its summary."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import jaxslowmo as js

from .._output import json_line, write_json
from ..config._train import TrainConfig


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
        self._folder, self._metrics = folder, None
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        metrics = folder / "metrics.jsonl"
        if after and metrics.exists():
            # A last line that was cut off does not count.
            lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
            before = [json.loads(line) for line in lines]
            self.records = [record for record in before if record["step"] <= after]
        self._metrics = metrics.open("w", encoding="utf-8")
        for record in self.records:
            self.write_record(record)

    def write_record(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, on disk at once."""
        if self._metrics is not None:
            self._metrics.write(json_line(record))
            self._metrics.flush()

    def finish(self, summary: dict[str, Any], statistics: js.StepReport | None) -> None:
        """Writes summary.json, and statistics.json if there are any."""
        if self._metrics is None:
            return
        write_json(self._folder / "summary.json", summary)
        if statistics:
            statistics.write(self._folder / "statistics.json")

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()
