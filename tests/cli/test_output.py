"""Where results go, and values as JSON."""

import datetime
import errno
import json
import os
import tempfile

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._output import json_line, write_json
from jaxslowmo.cli.config._training import TrainConfig
from jaxslowmo.cli.run._run_folder import make_folder


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_folder(tmp_path / "a" / "b", "train").is_dir()
    made = make_folder(None, "tune")
    assert (made.parent.name, made.is_dir()) == ("runs", True)
    assert made.name.startswith("tune-")
    (tmp_path / "taken").touch()
    with pytest.raises(CommandError, match="--out must be a folder to write to"):
        make_folder(tmp_path / "taken", "train")


def test_runs_that_start_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datetime, "datetime", Stopped)
    made = [make_folder(None, "train").name for _ in range(3)]
    stem = "train-20260102-030405"
    assert made == [stem, f"{stem}-2", f"{stem}-3"]
    (tmp_path / "runs" / stem).rmdir()
    assert make_folder(None, "train").name == stem
    monkeypatch.chdir(tmp_path / "runs" / stem)
    (tmp_path / "runs" / stem / "runs").touch()
    with pytest.raises(CommandError, match="--out must be a folder to write to, runs"):
        make_folder(None, "train")


def test_a_disk_that_is_full_is_no_wrong_call(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CommandError, match="No space left") as raised:
        make_folder(tmp_path, "train")
    assert str(tmp_path) in str(raised.value)
    assert raised.value.code == 75


def test_json_has_null_for_what_it_lacks(tmp_path):
    assert json_line({"a": [1.0, float("inf")], "b": {"c": float("nan")}}) == (
        '{"a": [1.0, null], "b": {"c": null}}\n'
    )
    write_json(tmp_path / "config.json", TrainConfig(steps=77))
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["steps"], found["algorithm"]["algorithm"]) == (77, "slowmo")
