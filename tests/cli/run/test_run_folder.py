"""A fresh run in the folder of an earlier one: refused with what lies there, or it is deleted."""

import datetime
import errno
import json
import os
import tempfile

import pytest

from cli.commands import TINY, json_of
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run import _job
from jaxslowmo.cli.run._run_folder import RunFolder, locked_folder, make_folder

CONFIG = json.dumps({"steps": 9, "algorithm": "sgp"})
COMPARED = json.dumps({"algorithms": ["sgp", "diloco"]})
METRICS = '{"step": 6}\n{"step": 7}\n{"step": 8, "lo'


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"corpus.json": "{}", "lock": "{}", "notes.txt": ""}, None),
        ({"checkpoints/notes.txt": "", "checkpoints/007/x": "", "checkpoints/²/x": ""}, None),
        (
            {"config.json": CONFIG, "summary.json": '{"status": "finished"}'},
            "a run (finished, last step 0, no checkpoint)",
        ),
        (
            {"config.json": CONFIG, "metrics.jsonl": METRICS, "checkpoints/5/x": ""},
            "a run (not finished, last step 7, 1 checkpoint)",
        ),
        (
            {"config.json": "{", "summary.json": "[]", "checkpoints/5/x": "",
             "checkpoints/6/x": "", "checkpoints/7.set-aside/x": ""},
            "a run (not finished, last step 0, 2 checkpoints)",
        ),
        ({"config.json": COMPARED}, "a comparison of sgp, diloco (not finished)"),
        (
            {"config.json": COMPARED, "compare.json": "{}"},
            "a comparison of sgp, diloco (finished)",
        ),
    ],
)  # fmt: skip
def test_what_lies_there_is_told_with_the_ways_out(tmp_path, files, words):
    write(tmp_path, files)
    assert RunFolder(tmp_path).describe_leftovers() == words
    if words is None:
        RunFolder(tmp_path).refuse_leftovers(may_resume=True)
        return
    for may_resume in (True, False):
        with pytest.raises(CommandError) as raised:
            RunFolder(tmp_path).refuse_leftovers(may_resume=may_resume)
        goes_on = words.startswith("a run") and "(finished" not in words
        assert ("--resume" in str(raised.value)) == (may_resume and goes_on)
        assert f"--out {tmp_path} holds {words}: give" in str(raised.value)
        assert "--overwrite" in str(raised.value)


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(tmp_path):
    RunFolder(tmp_path / "missing").refuse_leftovers(may_resume=True)
    write(tmp_path, {"config.json": CONFIG, "summary.json": '{"status": "finished"}'})
    with pytest.raises(CommandError, match="holds a run "):
        RunFolder(tmp_path).refuse_leftovers(may_resume=True, resumes=True)
    for left in ({"summary.json": '{"status": "preempted"}'}, {"checkpoints/5/x": ""}):
        write(tmp_path, {"summary.json": '{"status": "finished"}', **left})
        RunFolder(tmp_path).refuse_leftovers(may_resume=True, resumes=True)


OURS = """config.json metrics.jsonl summary.json statistics.json compare.json compare.png
    checkpoints/5/state/d/x checkpoints/6.set-aside/x checkpoints/7.orbax-checkpoint-tmp/x
    model/jaxslowmo.json model/model.safetensors logs/process-1.txt
    tensorboard/events.out.tfevents.1.host.2 sgp+graph=ring-seed0/config.json
    sgp+graph=ring-seed0/summary.json .writing-01234567-config.json"""
OTHERS = """lock lock.json notes.txt config.json.bak checkpoints/notes.txt logs/mine.txt
    tensorboard/mine.txt data-seed/a.txt diloco-seed1/notes.txt corpus.json"""


def test_a_sweep_deletes_what_is_ours_and_nothing_else(tmp_path):
    write(tmp_path, dict.fromkeys([*OURS.split(), *OTHERS.split()], "text"))
    RunFolder(tmp_path).sweep(keep=tmp_path / "corpus.json")
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(OTHERS.split())
    assert RunFolder(tmp_path).describe_leftovers() is None
    assert not (tmp_path / "model").exists()
    # Runs beside those of a run are of their own: somebody has once trained in a folder of runs.
    others = dict.fromkeys(["sgp-seed0/config.json", "sgp-seed0/checkpoints/5/x"], "text")
    write(tmp_path, others | {"config.json": CONFIG, "model/weights.npz": "mine"})
    RunFolder(tmp_path).sweep()
    assert not (tmp_path / "config.json").exists()
    assert not (tmp_path / "corpus.json").exists()
    assert all((tmp_path / name).exists() for name in (*others, "model/weights.npz"))


def test_overwrite_deletes_once_all_is_right(call, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train = f"{TINY} --algorithm local_sgd --replicas 2 --data {text} --out {out}"
    assert call(train, "--steps 3 --checkpoint-every 2").code == 0
    before = (out / "metrics.jsonl").read_bytes()
    found = "holds a run (finished, last step 3, 2 checkpoints)"
    call(train, "--steps 2").is_refused(f"--out {out} {found}")
    # A wrong call deletes nothing.
    call(train, "--overwrite --graph ring:9").is_refused("--graph")
    call(train, "--overwrite --batch 400").is_refused("400")
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "3"]

    # Killed before its first checkpoint, the new run starts anew, not from the old one's step 3.
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_job.Job, "run", killed)
    assert call(train, "--overwrite --steps 2").code == 130
    monkeypatch.undo()
    assert not (out / "checkpoints").exists()
    outcome = call(train, "--resume --steps 2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "There is no checkpoint" in outcome.out
    summary = json_of(out / "summary.json")
    assert (summary["steps"], summary["status"]) == (2, "finished")
    assert not (out / "lock").exists()


def test_folders_are_made_and_after_a_wrong_call_a_new_one_is_gone(tmp_path, monkeypatch):
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, 6, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datetime, "datetime", Stopped)
    assert str(make_folder(None, "train")) == "runs/train-20260102-030405-000006"
    for before in (False, True):
        folder = tmp_path / "a" / "b"
        if before:
            folder.mkdir()
        with pytest.raises(CommandError, match="wrong"), locked_folder(folder, "train"):
            raise CommandError("wrong")
        assert folder.exists() == before

    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)  # a full disk is no wrong call
    with pytest.raises(CommandError, match=str(tmp_path)) as raised:
        make_folder(tmp_path, "train")
    assert raised.value.code == 75


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "no checkpoint in "),
        (["5", "40", "300.tmp", "notes"], "the last saved step is 40, in "),
        (["0"], "the last saved step is 0, in "),
        (["2147483647", "5"], "the last saved step is 2147483647, in "),
        (["5", "2147483648", "007", "²", "٣", "-1"], "step is 5, in "),
    ],
)
def test_only_a_number_that_a_step_can_have_is_a_checkpoint(tmp_path, names, words):
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert words in RunFolder(tmp_path).last_saved()


def test_the_last_recorded_step_is_read_off_damaged_records(tmp_path):
    assert RunFolder(tmp_path).last_recorded() is None
    for text, step in (
        (b"", None),
        (b'{"step": 4}\n{"step": 5}\n{"st', 5),
        (b'{"step": 4}\n\0\0\0\0\n[1]\n\xff\xfe\n{"loss": 3}\n{"step": null}\n', 4),
        (b'{"step": 1}\n' * 20000 + b'{"step": 2}\n', 2),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(text)
        assert RunFolder(tmp_path).last_recorded() == step
