"""The files of a run: metrics and events, which grow, and its configuration and summary."""

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxslowmo as js

from ..._support.checks import warn_user
from ..._support.files import replacing
from .._output import json_line, write_json
from ..config._training import TrainConfig
from ._run_folder import RunFolder


class RunFiles:
    """A context in which `write_record` adds to metrics.jsonl, and to events of TensorBoard.

    If a file or the folder is deleted meanwhile, the next record restores it completely.

    Args:
      folder: folder of the run.
      config: configuration, written to config.json; with `config.tensorboard` there are events.
      writes: whether this process writes; one of several processes does.
      after: step from which the run goes on; later records, which an interrupted run may have
        left, are dropped. 0 drops all.

    Attributes:
      records: earlier records of the run, and those written since.

    Raises:
      ValueError: metrics.jsonl is damaged; it is not changed.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig, *, writes: bool, after: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._folder, self._config, self._writes = folder, config, writes
        self._events: Any = None
        self._files: list[GrowingFile] = []
        if not writes:
            return
        path = folder.metrics
        if after and path.exists():
            self.records = [record for record in _read(path) if record["step"] <= after]
        self._files.append(GrowingFile(path, self._lines, self._write_config))
        if config.tensorboard:
            from ._tensorboard import EventFile

            self._events = EventFile(folder.tensorboard, self.records, after=after)
            self._files.append(GrowingFile(self._events.path, self._events.whole))

    def write_record(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, on disk at once, and an event.

        While a disk is full or the folder is being deleted, data is kept and written later, at the
        latest at the end.

        Raises:
          OSError: it cannot be written. The file may hold a part of the line, which a resumed run
            drops.
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
        write_json(self._folder.config, self._config)

    def finish(self, summary: dict[str, Any], statistics: js.reports.StepReport | None) -> None:
        """Write summary.json, and statistics.json if there are statistics."""
        if not self._writes:
            return
        for file in self._files:  # a file may be deleted since the last record
            file.restore()
        write_json(self._folder.summary, summary)
        if statistics:
            statistics.write(self._folder.statistics)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._files:
                stack.callback(file.close, complete=error is None)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, without a last line that is cut off.

    Raises:
      ValueError: another line is not a record.
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


# Errors that may pass: the disk is full, or the folder is being deleted (the next record makes it
# again).
_RETRIED = (errno.ENOSPC, errno.ENOENT)


class GrowingFile:
    """A file that is written once as a whole, and then grows; all data is on disk at once.

    If the file or its folder is deleted meanwhile, the next addition restores the whole file.

    Args:
      path: path of the file.
      whole: returns the whole content that the file should have now.
      write_others: writes the other files of a folder that has to be made again.
    """

    def __init__(
        self,
        path: Path,
        whole: Callable[[], bytes],
        write_others: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._whole, self._write_others = path, whole, write_others
        self._unwritten, self._is_behind = b"", False
        self._file = self._write_all()

    def add(self, data: bytes) -> None:
        """Add data to the file, which `whole` already contains.

        While a disk is full or the folder is being deleted, data is kept and written later, at the
        latest at the end.

        Raises:
          OSError: it cannot be written; the file may hold a part of it.
        """
        try:
            self._add(data)
            self._is_behind = False
        except OSError as error:
            if error.errno not in _RETRIED:
                raise
            if not self._is_behind:
                self._is_behind = True
                warn_user(f"{self._path} does not grow: {error.strerror}; its lines are kept.")

    def restore(self) -> None:
        """Write the whole file again if it is gone; also after `close`."""
        if not self._path.exists():
            self._write_all().close()

    def close(self, *, complete: bool) -> None:
        """Close the file; if `complete`, write the data that was kept first.

        Raises:
          OSError: the data still cannot be written.
        """
        try:
            if complete:
                self._add(b"")
        finally:
            self._file.close()

    def _add(self, data: bytes) -> None:
        if not self._is_there():
            old, self._file = self._file, self._write_all()
            old.close()
            return
        self._unwritten += data
        while self._unwritten:  # a disk that fills up may take a part
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _is_there(self) -> bool:
        """Return whether the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _write_all(self) -> io.FileIO:
        """Write the whole file again, and return it opened for appending."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write_others()
        with replacing(self._path) as temporary:
            temporary.write_bytes(self._whole())
        self._unwritten = b""
        # Without a buffer, which would write data again that could not be written.
        return io.FileIO(self._path, "a")
