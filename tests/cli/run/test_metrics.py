"""The files of a run that is resumed, and of a process that leaves them to another."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxslowmo.cli._errors import code_of
from jaxslowmo.cli.config._training import TrainConfig
from jaxslowmo.cli.run import _metrics
from jaxslowmo.cli.run._metrics import GrowingFile, RunFiles
from jaxslowmo.cli.run._run_folder import RunFolder


def steps(metrics):
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]


def test_later_records_and_a_line_that_was_cut_off_are_dropped(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (0, 1, 2, 3)]
    for after, kept in ((0, []), (2, [0, 1, 2])):
        metrics.write_text("\n".join([*lines, '{"step": 2, "lo']))
        with RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=after) as files:
            assert [record["step"] for record in files.records] == kept
            files.write_record({"step": 9, "loss": float("nan")})
            assert metrics.read_text().endswith('{"step": 9, "loss": null}\n')  # at once
            assert [record["step"] for record in files.records] == [*kept, 9]
        files.finish({"status": "finished"}, None)
        assert steps(metrics) == [*kept, 9]
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json",
    }  # fmt: skip


def test_another_process_writes_nothing(tmp_path):
    with RunFiles(RunFolder(tmp_path / "out"), TrainConfig(), writes=False, after=0) as files:
        files.write_record({"step": 1})
    files.finish({}, None)
    assert files.records == [{"step": 1}]
    assert not (tmp_path / "out").exists()


def test_a_kill_while_the_file_is_rewritten_loses_nothing(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1507)))
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from jaxslowmo.cli.config._training import TrainConfig\n"
        "from jaxslowmo.cli.run import _metrics\n"
        "lines = []\n"
        "def json_line(record, usual=_metrics.json_line):\n"
        "    lines.append(record)\n"
        "    if len(lines) == 700:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return usual(record)\n"
        "_metrics.json_line = json_line\n"
        "folder = _metrics.RunFolder(Path(sys.argv[1]))\n"
        "_metrics.RunFiles(folder, TrainConfig(), writes=True, after=1400)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert steps(metrics) == list(range(1507))


@pytest.mark.parametrize(
    "damage",
    [b'{"step": 1, "lo\0\0\0\0', b"\xff\xfe", b"[1]", b'{"step": "1"}', b"", b'{"loss": 1}'],
)
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path, damage):
    metrics = tmp_path / "metrics.jsonl"
    content = b'{"step": 0}\n' + damage + b'\n{"step": 2}\n'
    metrics.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 "):
        RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=2)
    assert metrics.read_bytes() == content


@pytest.mark.parametrize("what", ["file", "folder", "moved"])
def test_records_come_back_when_the_file_is_deleted(tmp_path, what):
    folder = tmp_path / "out"
    with RunFiles(RunFolder(folder), TrainConfig(), writes=True, after=0) as files:
        for step in range(3):
            files.write_record({"step": step})
        if what == "folder":
            shutil.rmtree(folder)
        elif what == "file":
            (folder / "metrics.jsonl").unlink()
        else:
            (folder / "metrics.jsonl").write_text("")
            (folder / "metrics.jsonl").rename(folder / "old")
        files.write_record({"step": 3})
        files.write_record({"step": 4})
    assert steps(folder / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert json.loads((folder / "config.json").read_text())["preset"] == "1m"


def test_a_folder_that_is_just_being_deleted_comes_back_with_a_later_record(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    replacing = _metrics.replacing

    def meets_the_deletion(path):
        shutil.rmtree(folder)
        monkeypatch.undo()
        return replacing(path)

    with RunFiles(RunFolder(folder), TrainConfig(), writes=True, after=0) as files:
        files.write_record({"step": 0})
        shutil.rmtree(folder)
        monkeypatch.setattr(_metrics, "replacing", meets_the_deletion)
        with pytest.warns(UserWarning, match=r"does not grow: No such file or directory"):
            files.write_record({"step": 1})
        assert not folder.exists()
        files.write_record({"step": 2})
        assert steps(folder / "metrics.jsonl") == [0, 1, 2]
    shutil.rmtree(folder)
    files.finish({"steps": 2}, None)
    assert steps(folder / "metrics.jsonl") == [0, 1, 2]
    assert (folder / "summary.json").exists()


WRITE = io.FileIO.write


class FullDisk(io.FileIO):
    """Takes seven bytes, then is full."""

    def write(self, data, /):
        if len(data) > 7:
            return super().write(bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_wait_until_a_full_disk_takes_them(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(io, "FileIO", FullDisk)
    with RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=0) as files:
        with pytest.warns(UserWarning, match=r"metrics.jsonl does not grow: No space left"):
            files.write_record({"step": 1})
        files.write_record({"step": 2})  # told once
        assert metrics.read_bytes() == b'{"step": 1}\n{"step": '  # what it took
        monkeypatch.setattr(FullDisk, "write", WRITE)
        files.write_record({"step": 3})
        assert steps(metrics) == [1, 2, 3]


def test_a_disk_that_stays_full_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "FileIO", FullDisk)
    with (
        pytest.warns(UserWarning, match="does not grow"),
        pytest.raises(OSError, match="No space") as raised,
        RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=0) as files,
    ):
        files.write_record({"step": 1})
    assert code_of(raised.value) == 75
    monkeypatch.undo()
    metrics = tmp_path / "metrics.jsonl"
    assert metrics.read_bytes() == b'{"step"'
    with RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=1) as files:
        files.write_record({"step": 2})
    assert steps(metrics) == [2]


def test_another_error_of_the_disk_ends_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(GrowingFile, "_is_there", stale)
    with (
        pytest.raises(OSError, match="Stale") as raised,
        RunFiles(RunFolder(tmp_path), TrainConfig(), writes=True, after=0) as files,
    ):
        files.write_record({"step": 1})
    assert code_of(raised.value) == 75


def stale(file):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
