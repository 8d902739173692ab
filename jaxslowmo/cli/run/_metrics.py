"""The files of a run: metrics and events, which grow, and its configuration and summary."""

import contextlib
import errno
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import jaxslowmo as js

from ..._support.checks import warn_user
from ..._support.files import write_anew
from .._output import json_line, write_json
from ..config._training import TrainConfig
from ._run_folder import RunFolder

# Entries of records that become curves of TensorBoard.
_CURVES = (
    "loss", "validation_loss", "learning_rate", "tokens_per_second", "bytes_sent", "loss_scale",
    "skipped_updates",
)  # fmt: skip
# Errors that may pass: the disk is full, or the folder is being deleted (the next record makes it
# again).
_RETRIED = (errno.ENOSPC, errno.ENOENT)


class RunFiles:
    """A context in which `write_record` adds to metrics.jsonl, and to events of TensorBoard.

    If metrics.jsonl or the folder is deleted meanwhile, the next record restores all lines.

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
        self._unwritten, self._is_behind = b"", False
        self._events: Any = None
        if not writes:
            return
        if after and folder.metrics.exists():
            self.records = [line for line in _read(folder.metrics) if line["step"] <= after]
        self._file = self._write_all()
        if config.tensorboard:
            is_new = not folder.tensorboard.exists()
            self._begin_events(after)
            for record in self.records if is_new else ():
                self._add_events(record)

    def write_record(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, on disk at once, and events within some seconds.

        While a disk is full or the folder is being deleted, lines are kept and written later, at
        the latest at the end.

        Raises:
          OSError: the line cannot be written. The file may hold a part of it, which a resumed run
            drops.
        """
        self.records.append(record)
        if not self._writes:
            return
        try:
            self._add(json_line(record).encode())
            self._is_behind = False
        except OSError as error:
            if error.errno not in _RETRIED:
                raise
            if not self._is_behind:
                self._is_behind = True
                path = self._folder.metrics
                warn_user(f"{path} does not grow: {error.strerror}; its lines are kept.")
        if self._events is not None:
            if "rolled_back_from" in record:
                self._begin_events(record["step"])
            self._add_events(record)

    def finish(self, summary: dict[str, Any], statistics: js.reports.StepReport | None) -> None:
        """Write summary.json, and statistics.json if there are statistics; after the context."""
        if not self._writes:
            return
        if not self._folder.metrics.exists():  # deleted since the last record
            self._write_all().close()
        write_json(self._folder.summary, summary)
        if statistics:
            statistics.write(self._folder.statistics)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._writes:
            return
        try:
            if error is None:
                self._add(b"")
        finally:
            self._file.close()
            self._end_events()

    def _add(self, line: bytes) -> None:
        if not self._is_there():
            old, self._file = self._file, self._write_all()
            old.close()
            return
        self._unwritten += line
        while self._unwritten:  # a disk that fills up may take a part
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _is_there(self) -> bool:
        """Return whether the path of metrics.jsonl still names the open file."""
        try:
            return os.path.samestat(self._folder.metrics.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _write_all(self) -> io.FileIO:
        """Write config.json and all of metrics.jsonl; return the latter, opened for appending."""
        path = self._folder.metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._folder.config, self._config.to_file())
        write_anew(path, "".join(map(json_line, self.records)))
        self._unwritten = b""
        # Without a buffer, which would write data again that could not be written.
        return io.FileIO(path, "a")

    def _begin_events(self, after: int) -> None:
        """Begin a file of events, from which TensorBoard ignores earlier events past a step."""
        from tensorboardX import SummaryWriter

        self._end_events()
        self._events = SummaryWriter(
            str(self._folder.tensorboard),
            purge_step=after + 1,
            # Its thread ends with the first error. A full queue would then stop the training.
            max_queue=0,
            flush_secs=10,
            # The name has whole seconds, within which a run may begin twice.
            filename_suffix=f".{time.time_ns()}",
        )

    def _add_events(self, record: dict[str, Any]) -> None:
        for name in _CURVES:
            if record.get(name) is not None:
                self._events.add_scalar(name, record[name], record["step"])

    def _end_events(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):  # the same data is in metrics.jsonl
                self._events.close()


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
