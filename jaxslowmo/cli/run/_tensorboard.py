"""Records as events for TensorBoard; needs tensorboardX, which has their messages."""

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import (  # names that protobuf makes at run time
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

# TensorBoard reads files whose names contain this, in the order of the names.
_PREFIX = "events.out.tfevents"
_VERSION = "brain.Event:2"
# Entries of records that become curves.
_CURVES = (
    "loss", "validation_loss", "learning_rate", "tokens_per_second", "bytes_sent", "loss_scale",
    "skipped_updates",
)  # fmt: skip


class EventFile:
    """The events of one start of a run; the writer of tensorboardX would lose them on a full disk.

    Args:
      folder: folder for the events of the run.
      earlier: records of earlier starts.
      after: step from which the run goes on. TensorBoard ignores later steps in earlier files.

    Attributes:
      path: path of the file, a new one for every start.
    """

    def __init__(self, folder: Path, earlier: Iterable[dict[str, Any]], *, after: int) -> None:
        name = f"{_PREFIX}.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._events = [_framed(Event(wall_time=time.time(), file_version=_VERSION))]
        if after:
            self._events.append(_begins(after + 1))
        if not any(folder.glob(f"{_PREFIX}.*")):
            for record in earlier:
                self.add(record)

    def whole(self) -> bytes:
        """Return all events so far, as bytes of a file."""
        return b"".join(self._events)

    def add(self, record: dict[str, Any]) -> bytes:
        """Add a record, and return the bytes to append to the file."""
        step, new = record["step"], b""
        if "rolled_back_from" in record:
            new += _begins(step + 1)
        values = [
            Summary.Value(tag=name, simple_value=record[name])
            for name in _CURVES
            if record.get(name) is not None
        ]
        new += _framed(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.append(new)
        return new


def _begins(step: int) -> bytes:
    """Return the event from which TensorBoard ignores earlier events of this and later steps."""
    start = SessionLog(status=SessionLog.START)
    return _framed(Event(wall_time=time.time(), step=step, session_log=start))


def _framed(event: Event) -> bytes:
    """Return an event as files of TensorFlow hold it: length and content, each with a checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return b"".join((length, next(checks), data, next(checks)))
