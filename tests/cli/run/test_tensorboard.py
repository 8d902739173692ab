"""Events of TensorBoard, read back as TensorBoard does."""

import errno
import io
import os
import shutil
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._metrics import RunFiles
from jaxslowmo.cli.run._run_folder import RunFolder

CONFIG = train_config({"tensorboard": True})


def events(folder):
    """All events of a run, file by file; checksums are compared."""
    for path in sorted((folder / "tensorboard").iterdir()):
        rest = path.read_bytes()
        while rest:
            head, check, rest = rest[:8], rest[8:12], rest[12:]
            assert struct.unpack("<I", check)[0] == masked_crc32c(head)
            (size,) = struct.unpack("<Q", head)
            data, check, rest = rest[:size], rest[size : size + 4], rest[size + 4 :]
            assert struct.unpack("<I", check)[0] == masked_crc32c(data)
            yield Event.FromString(data)


def curves(folder):
    """By tag the values by step; what a later start did anew counts."""
    found = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            found = {
                tag: {step: x for step, x in curve.items() if step < event.step}
                for tag, curve in found.items()
            }
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def write(folder, *records, after=0, config=CONFIG, writes=True):
    with RunFiles(RunFolder(folder), config, writes=writes, after=after) as files:
        for record in records:
            files.write_record(record)


def test_a_curve_for_every_number(tmp_path):
    write(
        tmp_path,
        {"step": 0, "bytes_sent": 0, "validation_loss": 5.5},
        {"step": 1, "loss": 4.0, "learning_rate": 0.5, "tokens_per_second": None, "bytes_sent": 8},
        {"step": 2, "loss": float("inf"), "bytes_sent": 16, "resumed": []},
    )
    first = next(events(tmp_path))
    assert first.file_version == "brain.Event:2"
    assert curves(tmp_path) == {
        "bytes_sent": {0: 0, 1: 8, 2: 16},
        "validation_loss": {0: 5.5},
        "loss": {1: 4.0, 2: float("inf")},
        "learning_rate": {1: 0.5},
    }


def test_a_resumed_run_goes_on_with_the_same_curves(tmp_path):
    write(tmp_path, *({"step": step, "loss": 1.0} for step in range(5)))
    write(tmp_path, {"step": 3, "loss": 2.0}, after=2)
    assert curves(tmp_path) == {"loss": {0: 1, 1: 1, 2: 1, 3: 2}}
    write(tmp_path, {"step": 2, "rolled_back_from": 3}, {"step": 3, "loss": 3.0}, after=3)
    assert curves(tmp_path) == {"loss": {0: 1, 1: 1, 2: 1, 3: 3}}


def test_a_run_that_begins_with_it_later_has_its_earlier_records_too(tmp_path):
    write(tmp_path, *({"step": step, "loss": 1.0} for step in range(3)), config=train_config({}))
    assert not (tmp_path / "tensorboard").exists()
    write(tmp_path, {"step": 2, "loss": 2.0}, after=1)
    assert curves(tmp_path) == {"loss": {0: 1, 1: 1, 2: 2}}


def test_another_process_writes_none(tmp_path):
    write(tmp_path / "out", {"step": 0, "loss": 1.0}, writes=False)
    assert not (tmp_path / "out").exists()


def test_events_come_back_when_the_folder_is_deleted(tmp_path):
    folder = tmp_path / "out"
    with RunFiles(RunFolder(folder), CONFIG, writes=True, after=0) as files:
        files.write_record({"step": 0, "loss": 1.0})
        shutil.rmtree(folder / "tensorboard")
        files.write_record({"step": 1, "loss": 2.0})
        shutil.rmtree(folder)
    files.finish({}, None)
    assert curves(folder) == {"loss": {0: 1, 1: 2}}


class FullForEvents(io.FileIO):
    """Takes seven bytes of events, then is full."""

    is_full = True

    def write(self, data, /):
        if not self.is_full or "tfevents" not in str(self.name):
            return super().write(data)
        if len(data) > 7:
            return super().write(bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_events_wait_until_a_full_disk_takes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "FileIO", FullForEvents)
    with RunFiles(RunFolder(tmp_path), CONFIG, writes=True, after=0) as files:
        with pytest.warns(UserWarning, match=r"tfevents\S* does not grow: No space left"):
            files.write_record({"step": 0, "loss": 1.0})
        files.write_record({"step": 1, "loss": 2.0})
        monkeypatch.setattr(FullForEvents, "is_full", False)
    assert curves(tmp_path) == {"loss": {0: 1, 1: 2}}


def test_a_disk_that_stays_full_ends_the_run_with_the_metrics_written(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "FileIO", FullForEvents)
    with (
        pytest.warns(UserWarning, match="does not grow"),
        pytest.raises(OSError, match="No space"),
    ):
        write(tmp_path, {"step": 1, "loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_train_writes_them_and_overwrite_deletes_them(call, text, tmp_path):
    out = tmp_path / "out"
    train = (
        "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd",
        "--replicas", 2, "--algorithm", "local_sgd", "--log-every", 1, "--steps", 2, "--data", text,
        "--out", out, "--tensorboard",
    )  # fmt: skip
    assert call(*train).code == 0
    found = curves(out)
    assert list(found["loss"]) == [1, 2]
    assert sorted(found["validation_loss"]) == [0, 2]
    names = {path.name for path in (out / "tensorboard").iterdir()}
    assert call(*train, "--overwrite").code == 0
    (name,) = (path.name for path in (out / "tensorboard").iterdir())
    assert name not in names
