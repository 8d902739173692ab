"""The files of a run that grow: its metrics as they come; and its configuration and summary."""

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
        write_json(self._folder.config, self._config)

    def finish(self, summary: dict[str, Any], statistics: js.StepReport | None) -> None:
        """Writes summary.json, and statistics.json if there are any."""
        if not self._writes:
            return
        for file in self._files:  # deleted since the last record, maybe with the folder
            file.bring_back()
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


# The disk is full; or somebody is deleting the folder just now, and the next record makes it anew.
_WAITED_FOR = (errno.ENOSPC, errno.ENOENT)


class GrowingFile:
    """A file that is written anew, and then added to, on disk at once.

    Should it or its folder be deleted meanwhile, the next addition brings all of it back.

    Args:
      path: of the file.
      whole: all that it should hold by now.
      besides: what else stands in a folder that has to be made anew.
    """

    def __init__(
        self, path: Path, whole: Callable[[], bytes], besides: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._whole, self._besides = path, whole, besides
        self._unwritten, self._is_behind = b"", False
        self._file = self._write_all()

    def add(self, data: bytes) -> None:
        """Adds to the file what `whole` holds by now.

        What a full disk, or a folder that is being deleted, does not take waits until it does,
        until the end at the latest.

        Raises:
          OSError: it cannot be written; a part of it may be there.
        """
        try:
            self._add(data)
            self._is_behind = False
        except OSError as error:
            if error.errno not in _WAITED_FOR:
                raise
            if not self._is_behind:
                self._is_behind = True
                warn_user(f"{self._path} does not grow: {error.strerror}; its lines are kept.")

    def bring_back(self) -> None:
        """Writes it anew where it is gone; after `close`, too."""
        if not self._path.exists():
            self._write_all().close()

    def close(self, *, complete: bool) -> None:
        """Ends it; if `complete`, with what waits.

        Raises:
          OSError: that still cannot be written.
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
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _write_all(self) -> io.FileIO:
        """The whole file anew, to be added to."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._besides()
        with replacing(self._path) as temporary:
            temporary.write_bytes(self._whole())
        self._unwritten = b""
        # Without a buffer: what could not be written must not come a second time.
        return io.FileIO(self._path, "a")
