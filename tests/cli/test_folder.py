"""The folder of a run: what is left there, what is deleted, and its lock."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cli.commands import QUICK, TINY, json_of
from jaxslowmo.cli import _run
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._folder import RunFolder, lock_folder, make_folder

CONFIG = json.dumps({"steps": 9, "algorithm": "sgp"})
COMPARED = json.dumps({"algorithms": ["sgp", "diloco"]})
METRICS = '{"step": 6}\n{"step": 7}\n{"step": 8, "lo'


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "words", "can_go_on"),
    [
        (
            {"checkpoints/notes": "", "checkpoints/007/x": "", "checkpoints/²/x": "", "lock": "{}"},
            None,
            True,
        ),
        (
            {"config.json": CONFIG, "summary.json": '{"status": "finished"}'},
            "a run (finished, last step 0, no checkpoint)",
            False,  # it would train a new model
        ),
        (
            {"config.json": CONFIG, "metrics.jsonl": METRICS, "checkpoints/5/x": ""},
            "a run (not finished, last step 7, a checkpoint of step 5)",
            True,
        ),
        ({"config.json": COMPARED, "compare.json": "{}"}, "a comparison", False),
    ],
)  # fmt: skip
def test_what_lies_there_is_told_with_the_ways_out(tmp_path, files, words, can_go_on):
    write(tmp_path, files)
    for resumes in (True, False, None):
        if words is None or (resumes and can_go_on):
            RunFolder(tmp_path).check_no_earlier_run(resumes=resumes)
            continue
        with pytest.raises(CommandError) as raised:
            RunFolder(tmp_path).check_no_earlier_run(resumes=resumes)
        assert ("--resume" in str(raised.value)) == (can_go_on and resumes is not None)
        assert f"--out {tmp_path} holds {words}: give" in str(raised.value)
        assert "--overwrite" in str(raised.value)


OURS = """config.json metrics.jsonl summary.json statistics.json compare.json compare.png loss.png
    checkpoints/5/state/d/x checkpoints/6.set-aside/x checkpoints/7.orbax-checkpoint-tmp/x
    model/jaxslowmo.json model/model.safetensors logs/process-1.txt
    tensorboard/events.out.tfevents.1.host.2 sgp+graph=ring-seed0/config.json
    sgp+graph=ring-seed0/summary.json .writing-01234567-config.json"""
OTHERS = """lock lock.json notes.txt config.json.bak checkpoints/notes.txt logs/mine.txt
    tensorboard/mine.txt data-seed/a.txt diloco-seed1/notes.txt"""


def test_a_sweep_deletes_what_is_ours_and_nothing_else(tmp_path):
    write(tmp_path, dict.fromkeys([*OURS.split(), *OTHERS.split()], "text"))
    RunFolder(tmp_path).delete_run_files()
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(OTHERS.split())
    RunFolder(tmp_path).check_no_earlier_run(resumes=False)
    assert not (tmp_path / "model").exists()
    # Runs beside those of a run are of their own: somebody has once trained in a folder of runs.
    write(tmp_path, {"sgp-seed0/config.json": "", "config.json": CONFIG})
    RunFolder(tmp_path).delete_run_files()
    assert (tmp_path / "sgp-seed0/config.json").exists()


def test_overwrite_deletes_once_all_is_right(call, text, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def call(*parts, call=call):
        return call(*parts, QUICK)

    train = f"{TINY} --algorithm local_sgd --replicas 2 --data {text} --out {out}"
    assert call(train, "--steps 3 --checkpoint-every 2").code == 0
    before = (out / "metrics.jsonl").read_bytes()
    found = "holds a run (finished, last step 3, a checkpoint of step 3)"
    call(train, "--steps 2").is_refused(f"--out {out} {found}")
    # A wrong call deletes nothing.
    call(train, "--overwrite --batch 400").is_refused("400")
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "3"]

    # Killed before its first checkpoint, the new run starts anew, not from the old one's step 3.
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_run.Job, "run", killed)
    assert call(train, "--overwrite --steps 2").code == 130
    monkeypatch.undo()
    assert not (out / "checkpoints").exists()
    outcome = call(train, "--resume --steps 2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "There is no checkpoint" in outcome.out
    summary = json_of(out / "summary.json")
    assert (summary["steps"], summary["status"]) == (2, "finished")
    assert not (out / "lock").exists()


def test_after_a_wrong_call_a_new_folder_is_gone_and_a_full_disk_is_no_wrong_call(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"runs/train-\d{8}-\d{6}-\d{6}", str(make_folder(None, "train")))
    for before in (False, True):
        folder = tmp_path / "a" / "b"
        if before:
            folder.mkdir()
        with pytest.raises(CommandError, match="wrong"), lock_folder(folder, "train"):
            raise CommandError("wrong")
        assert folder.exists() == before

    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CommandError, match=str(tmp_path)) as raised:
        make_folder(tmp_path, "train")
    assert raised.value.code == 75


HOLD = """
import sys, time
from pathlib import Path
from jaxslowmo.cli._folder import lock_folder
with lock_folder(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    time.sleep(600)
"""


def takes(folder):
    with lock_folder(folder, "train") as held:
        return held.read_json("lock.json")["token"] == held.token


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    """The parent has not even taken note of the death."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            told = rf"--out {tmp_path} .* {process.pid} on .* since 20"
            with pytest.raises(CommandError, match=told):
                takes(tmp_path)
            (tmp_path / "lock.json").write_text("[1]")  # damaged
            with pytest.raises(CommandError, match="in use by another process"):
                takes(tmp_path)
        finally:
            os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert takes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_come_one_takes_the_lock_of_a_process_that_was_killed(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "lock.json").write_text('{"pid": 1, "host": "gone", "since": "2026", "token": ""}')
    inside, most, start = [], [], threading.Barrier(8)

    def come(_):
        start.wait()
        with contextlib.suppress(CommandError), lock_folder(tmp_path, "train"):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(come, range(8))] == [None] * 8
    assert set(most) == {1}
