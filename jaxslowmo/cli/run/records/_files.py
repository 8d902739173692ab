"""The files of a run: its configuration, its metrics as they come, its summary."""

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import jaxslowmo as js

from ..._output import json_line, write_json
from ...config._train import TrainConfig
from ._growing import GrowingFile


class RunFiles:
    """Context in which `write_record` adds to metrics.jsonl, and to events of TensorBoard.

    Should a file or the folder be deleted meanwhile, the next record brings all of it back.

    Args:
      folder: of the run.
      config: written to config.json; it says whether there are events.
      writes: False for a process that leaves all this to another.
      after: step that the run goes on from; later records, which an interrupted run may have
        left, are dropped. 0 drops all.

    Attributes:
      records: those that were there before, and those written since.

    Raises:
      ValueError: metrics.jsonl is damaged; it is left as it is.
    """

    def __init__(self, folder: Path, config: TrainConfig, *, writes: bool, after: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._folder, self._config, self._writes = folder, config, writes
        self._events: Any = None
        self._files: list[GrowingFile] = []
        if not writes:
            return
        path = folder / "metrics.jsonl"
        if after and path.exists():
            self.records = [record for record in _read(path) if record["step"] <= after]
        self._files.append(GrowingFile(path, self._lines, self._write_config))
        if config.tensorboard:
            from ._tensorboard import EventFile

            self._events = EventFile(folder, self.records, after=after)
            self._files.append(GrowingFile(self._events.path, self._events.whole))

    def write_record(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, on disk at once, and an event.

        What a full disk, or a folder that is being deleted, does not take waits until it does,
        until the end at the latest.

        Raises:
          OSError: it cannot be written; a part of the line may be there, which a resumed run drops.
        """
        self.records.append(record)
        if not self._writes:
            return
        new = [json_line(record).encode()]
        if self._events is not None:
            new.append(self._events.add(record))
        for file, data in zip(self._files, new, strict=True):
            file.add(data)

    def _lines(self) -> bytes:
        return "".join(map(json_line, self.records)).encode()

    def _write_config(self) -> None:
        write_json(self._folder / "config.json", self._config)

    def finish(self, summary: dict[str, Any], statistics: js.StepReport | None) -> None:
        """Writes summary.json, and statistics.json if there are any."""
        if not self._writes:
            return
        for file in self._files:  # deleted since the last record, maybe with the folder
            file.bring_back()
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
        with contextlib.ExitStack() as stack:
            for file in self._files:
                stack.callback(file.close, complete=error is None)


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a last line that was cut off does not count.

    Raises:
      ValueError: another line is none of ours.
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError(f"its step is {record['step']!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: line {number} is no record of a step ({error!r}). Remove that "
                "line, or move the file away, and resume again."
            ) from error
        records.append(record)
    return records
