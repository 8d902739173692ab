"""metrics.jsonl and events of TensorBoard: resumed, deleted, on a full disk; nothing is lost."""

import errno
import io
import json
import os
import shutil
import types
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands import curves, records
from jaxslowmo.cli._config import TrainConfig, replace_options
from jaxslowmo.cli._errors import code_of
from jaxslowmo.cli._folder import RunFolder
from jaxslowmo.cli._record import (
    Best,
    ByteLedger,
    Recorder,
    Reporter,
    format_bytes,
    format_count,
    to_json,
)

CONFIG = replace_options(TrainConfig(), {"tensorboard": True})


class Told:
    """A report of bytes by kind."""

    def __init__(self, **by_kind):
        self.kinds, self.axes, self._by_kind = [*by_kind], ["replica"], by_kind

    def wire_bytes(self, axis, kind):
        return self._by_kind[kind]


def ledger(**by_kind):
    return ByteLedger(Told(**by_kind), types.SimpleNamespace(shape={"replica": 2}))


def opened(folder, after=0, config=CONFIG, writes=True):
    quiet = Reporter(Console(quiet=True), "", 1)
    own = RunFolder(folder) if writes else None
    return Recorder(config, ledger(local=0), own, quiet, after, Best())


def steps(folder):
    return [record["step"] for record in records(folder)]


def write(folder, *lines, **options):
    with opened(folder, **options) as files:
        for line in lines:
            files._add_record(line)


def test_later_records_and_a_line_that_was_cut_off_are_dropped(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (0, 1, 2, 3)]
    for after, kept in ((0, []), (2, [0, 1, 2])):
        metrics.write_text("\n".join([*lines, '{"step": 2, "lo']))
        with opened(tmp_path, after, TrainConfig()) as files:
            assert [record["step"] for record in files.records] == kept
            files._add_record({"step": 9, "loss": float("nan")})
            assert metrics.read_text().endswith('{"step": 9, "loss": null}\n')  # at once
            assert [record["step"] for record in files.records] == [*kept, 9]
        assert files.summary("finished", seven=7)["seven"] == 7
        assert steps(tmp_path) == [*kept, 9]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "summary.json"}
    with opened(tmp_path / "out", writes=False) as files:  # another process
        files._add_record({"step": 1})
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_goes_on_with_the_same_curves(tmp_path):
    first = {"step": 0, "bytes_sent": 0, "validation_loss": 5.5}
    second = {"step": 1, "loss": 4.0, "tokens_per_second": None, "bytes_sent": 8}
    write(tmp_path, first, second, config=TrainConfig())
    assert not (tmp_path / "tensorboard").exists()
    # One that begins with it later has its earlier records, too.
    third = {"step": 2, "loss": float("inf"), "bytes_sent": 16, "resumed": []}
    write(tmp_path, third, {"step": 3, "loss": 1.0}, {"step": 4, "loss": 1.0}, after=1)
    write(tmp_path, {"step": 3, "loss": 2.0}, {"step": 2, "rolled_back_from": 3}, after=2)
    assert curves(tmp_path) == {
        "bytes_sent": {0: 0, 1: 8, 2: 16},
        "validation_loss": {0: 5.5},
        "loss": {1: 4.0, 2: float("inf")},
    }
    write(tmp_path, {"step": 3, "loss": 3.0}, after=3)
    assert curves(tmp_path)["loss"] == {1: 4.0, 2: float("inf"), 3: 3.0}


def test_records_come_back_when_files_are_deleted(tmp_path):
    folder = tmp_path / "out"
    with opened(folder) as files:
        for step in range(3):
            files._add_record({"step": step, "loss": 1.0})
        shutil.rmtree(folder)
        for step in (3, 4):
            files._add_record({"step": step, "loss": 1.0})
    assert steps(folder) == [0, 1, 2, 3, 4]
    assert json.loads((folder / "config.json").read_text())["preset"] == "1m"


class FullDisk(io.FileIO):
    """A file that takes seven bytes, and then is full."""

    is_full = True

    def write(self, data, /):
        if not self.is_full:
            return super().write(data)
        if len(data) > 7:
            return super().write(bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_wait_until_a_full_disk_takes_them_or_end_the_run(tmp_path, monkeypatch):
    usual = Path.open

    def on_full(path, mode="r", *args, **options):
        if mode == "r+b":
            return io.BufferedRandom(FullDisk(path, "rb+"))
        if "w" in mode and FullDisk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(path, mode, *args, **options)

    def run():
        with opened(tmp_path) as files:
            monkeypatch.setattr(Path, "open", on_full)
            with pytest.warns(UserWarning, match=r"metrics\S* does not grow: No space left"):
                files._add_record({"step": 1, "loss": 1.0})
            files._add_record({"step": 2, "loss": 2.0})  # one warning is enough
            monkeypatch.setattr(FullDisk, "is_full", False)
            files._add_record({"step": 3, "loss": 3.0})
            assert steps(tmp_path) == [1, 2, 3]
            monkeypatch.setattr(FullDisk, "is_full", True)
            files._add_record({"step": 5})

    with (
        pytest.warns(UserWarning, match="does not grow"),
        pytest.raises(OSError, match="No space") as raised,
    ):
        run()
    assert code_of(raised.value) == 75
    monkeypatch.undo()
    write(tmp_path, {"step": 6}, after=5)
    assert steps(tmp_path) == [1, 2, 3, 6]


def test_bytes_of_events_that_no_kind_holds_together_add_up():
    found = ledger(local=1, average=11, slow=101)
    assert [found.add(p) for p in ((), ("average",), ("average", "slow"))] == [1, 12, 123]
    assert ledger(every=5).add(()) == 5
    gossip = ledger(**{"local": 1, "round 0": 11, "round 1": 21})
    assert [gossip.add(p) for p in (("round 0",), ("round",))] == [11, 32]
    joined = ledger(**{"local": 0, "average": 10, "slow": 100, "average+slow": 105})
    assert joined.add(("slow", "average")) == 105


def test_numbers_are_short_and_json_has_null_for_what_it_lacks():
    assert [format_bytes(n) for n in (0, 999, 1000, 56_463_360, 999_700_000)] == [
        "0 B", "999 B", "1.00 kB", "56.5 MB", "1.00 GB",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 470_528, 1_073_536)] == ["12", "471k", "1.07M"]
    line = to_json({"a": [1.0, float("inf")], "b": {"c": float("nan")}})
    assert line == '{"a": [1.0, null], "b": {"c": null}}\n'
