"""The files of a run: its configuration, its metrics as they come, its summary."""

import errno
import io
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import jaxslowmo as js

from ..._replacing import write_anew
from ..._warn import warn_user
from .._output import json_line, write_json
from ..config._train import TrainConfig

# The disk is full; or somebody is deleting the folder just now, and the next record makes it anew.
_WAITED_FOR = (errno.ENOSPC, errno.ENOENT)


class RunFiles:
    """Context in which `write_record` adds to metrics.jsonl.

    Should the file or its folder be deleted meanwhile, the next record brings all of it back.

    Args:
      folder: of the run.
      config: written to config.json.
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
        self._folder, self._config = folder, config
        self._path = folder / "metrics.jsonl"
        self._metrics: io.FileIO | None = None
        self._unwritten, self._is_behind = b"", False
        if not writes:
            return
        if after and self._path.exists():
            self.records = [record for record in _read(self._path) if record["step"] <= after]
        self._metrics = self._write_all()

    def write_record(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, on disk at once.

        Lines that a full disk, or a folder that is being deleted, does not take wait until it does,
        until the end at the latest.

        Raises:
          OSError: it cannot be written; a part of the line may be there, which a resumed run drops.
        """
        self.records.append(record)
        if self._metrics is None:
            return
        try:
            self._add(self._metrics, json_line(record).encode())
            self._is_behind = False
        except OSError as error:
            if error.errno not in _WAITED_FOR:
                raise
            if not self._is_behind:
                self._is_behind = True
                warn_user(f"{self._path} does not grow: {error.strerror}; its lines are kept.")

    def _add(self, metrics: io.FileIO, line: bytes) -> None:
        if not self._is_there(metrics):
            self._metrics = self._write_all()
            metrics.close()
            return
        self._unwritten += line
        while self._unwritten:  # a disk that fills up may take a part
            self._unwritten = self._unwritten[metrics.write(self._unwritten) :]

    def _write_all(self) -> io.FileIO:
        """Configuration and all records anew; the metrics, to be added to."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / "config.json", self._config)
        write_anew(self._path, "".join(map(json_line, self.records)))
        self._unwritten = b""
        # Without a buffer: what could not be written must not come a second time.
        return io.FileIO(self._path, "a")

    def _is_there(self, metrics: io.FileIO) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(metrics.fileno()))
        except FileNotFoundError:
            return False

    def finish(self, summary: dict[str, Any], statistics: js.StepReport | None) -> None:
        """Writes summary.json, and statistics.json if there are any."""
        if self._metrics is None:
            return
        if not self._path.exists():  # deleted since the last record, maybe with its folder
            self._write_all().close()
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
        if self._metrics is None:
            return
        try:
            if error is None:
                self._add(self._metrics, b"")
        finally:
            self._metrics.close()


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
