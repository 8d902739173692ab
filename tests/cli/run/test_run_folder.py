"""A fresh run in the folder of an earlier one: refused with what lies there, or it is deleted."""

import json

import pytest

from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.run import _job
from jaxslowmo.cli.run._run_folder import RunFolder

TINY = (
    "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd", "--clip", 0,
    "--replicas", 2,
)  # fmt: skip
PERIODS = ("--sync-every", 2, "--slow-every", 4)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


CONFIG = json.dumps({"steps": 9, "algorithm": {"algorithm": "sgp"}})
COMPARED = json.dumps({"algorithms": ["sgp", "diloco"]})
METRICS = '{"step": 6}\n{"step": 7}\n{"step": 8, "lo'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, None),
        ({"corpus.json": "{}", "lock": "{}", "notes.txt": ""}, None),
        ({"checkpoints/notes.txt": "", "checkpoints/007/x": "", "checkpoints/²/x": ""}, None),
        (
            {"config.json": CONFIG, "summary.json": '{"status": "finished", "steps": 9}'},
            "a run of sgp (last step 9, finished, no checkpoint)",
        ),
        (
            {"config.json": CONFIG, "metrics.jsonl": METRICS, "checkpoints/5/x": ""},
            "a run of sgp (last step 7, not finished, 1 checkpoint)",
        ),
        (
            {"checkpoints/5/x": "", "checkpoints/6/x": "", "checkpoints/7.set-aside/x": ""},
            "a run of an algorithm (last step unknown, not finished, 2 checkpoints)",
        ),
        (
            {"config.json": "{", "metrics.jsonl": "\0\0\n", "summary.json": "[]"},
            "a run of an algorithm (last step unknown, not finished, no checkpoint)",
        ),
        ({"config.json": COMPARED}, "a comparison of sgp, diloco (not finished)"),
        (
            {"config.json": COMPARED, "compare.json": "{}"},
            "a comparison of sgp, diloco (finished)",
        ),
    ],
)
def test_what_lies_there(tmp_path, files, words):
    write(tmp_path, files)
    assert RunFolder(tmp_path).describe_leftovers() == words
    if words is None:
        RunFolder(tmp_path).refuse_leftovers(may_resume=True)
        return
    for may_resume in (True, False):
        with pytest.raises(CommandError) as raised:
            RunFolder(tmp_path).refuse_leftovers(may_resume=may_resume)
        goes_on = words.startswith("a run") and ", finished, no checkpoint" not in words
        resume = "--resume to go on with it, " if may_resume and goes_on else ""
        assert str(raised.value) == (
            f"--out {tmp_path} holds {words}: give {resume}another folder, or --overwrite to "
            "delete it first"
        )


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(tmp_path):
    write(tmp_path, {"config.json": CONFIG, "summary.json": '{"status": "finished"}'})
    with pytest.raises(CommandError, match=r"holds a run of sgp .*: give another folder, or"):
        RunFolder(tmp_path).refuse_leftovers(may_resume=True, resumes=True)
    for left in ({"summary.json": '{"status": "preempted"}'}, {"checkpoints/5/x": ""}):
        write(tmp_path, {"summary.json": '{"status": "finished"}', **left})
        RunFolder(tmp_path).refuse_leftovers(may_resume=True, resumes=True)


def test_a_folder_that_is_not_there(tmp_path):
    RunFolder(tmp_path / "missing").refuse_leftovers(may_resume=True)


OURS = (
    "config.json", "corpus.json", "metrics.jsonl", "summary.json", "statistics.json",
    "compare.json", "compare.png", "checkpoints/5/state/d/x", "checkpoints/6.set-aside/x",
    "checkpoints/7.orbax-checkpoint-tmp/x", "model/record/metadata", "model/state/d/x",
    "logs/process-1.txt", "tensorboard/events.out.tfevents.1.host.2",
    "sgp+graph=ring-seed0/config.json", "sgp+graph=ring-seed0/summary.json",
    "lock.0123456789ab", ".writing-01234567-config.json",
)  # fmt: skip
OTHERS = (
    "lock", "notes.txt", "config.json.bak", "checkpoints/notes.txt",
    "logs/mine.txt", "tensorboard/mine.txt", "data-seed/a.txt", "diloco-seed1/notes.txt",
)  # fmt: skip


def test_a_sweep_deletes_what_is_ours_and_nothing_else(tmp_path):
    write(tmp_path, dict.fromkeys([*OURS, *OTHERS], "text"))
    RunFolder(tmp_path).sweep()
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(OTHERS)
    assert RunFolder(tmp_path).describe_leftovers() is None
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "sgp+graph=ring-seed0").exists()
    write(tmp_path, {"model/weights.npz": "mine", "corpus.json": "{}"})
    RunFolder(tmp_path).sweep(keep=tmp_path / "corpus.json")
    assert (tmp_path / "corpus.json").exists()
    assert (tmp_path / "model" / "weights.npz").exists()


def test_runs_beside_those_of_a_run_are_of_their_own(tmp_path):
    """A folder of runs in which somebody has once trained, too."""
    others = dict.fromkeys(["sgp-seed0/config.json", "sgp-seed0/checkpoints/5/x"], "text")
    write(tmp_path, others | {"config.json": CONFIG})
    RunFolder(tmp_path).sweep()
    assert not (tmp_path / "config.json").exists()
    assert all((tmp_path / name).exists() for name in others)


def test_train(call, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train = ("train", *TINY, *PERIODS, "--data", text, "--out", out)
    assert call(*train, "--steps", 3, "--checkpoint-every", 2).code == 0
    before = (out / "metrics.jsonl").read_bytes()
    outcome = call(*train, "--steps", 2)
    assert outcome.code == 2
    assert outcome.err == (
        f"error: --out {out} holds a run of slowmo (last step 3, finished, 2 checkpoints): give "
        "--resume to go on with it, another folder, or --overwrite to delete it first\n"
    )
    # A wrong call deletes nothing.
    assert call(*train, "--overwrite", "--algorithm", "sgp", "--graph", "ring:9").code == 2
    outcome = call(*train, "--overwrite", "--batch", 400)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "3"]

    # Killed before its first checkpoint, the new run starts anew, not from the old one's step 3.
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_job.Job, "run", killed)
    assert call(*train, "--overwrite", "--steps", 2).code == 130
    monkeypatch.undo()
    assert not (out / "checkpoints").exists()
    outcome = call(*train, "--resume", "--steps", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert "There is no checkpoint" in outcome.out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["status"]) == (2, "finished")
    assert not (out / "lock").exists()


def test_a_sweep_that_is_killed_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, {"config.json": CONFIG, "checkpoints/5/x": "", "checkpoints/6/x": ""})

    def killed(path):
        assert (path / "x").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path).sweep()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["6"]
    monkeypatch.undo()
    RunFolder(tmp_path).sweep()
    assert list(tmp_path.iterdir()) == []


def test_overwrite_and_resume_exclude_each_other(call, tmp_path):
    outcome = call("train", "--overwrite", "--resume", "--out", tmp_path)
    assert outcome.code == 2
    assert outcome.err.startswith("error: --overwrite deletes what --resume would go on from")


def test_compare(call, text, tmp_path):
    out = tmp_path / "out"
    compare = (
        "compare", *TINY, "--data", text, "--out", out, "--steps", 2, "--algorithms", "all_reduce"
    )  # fmt: skip
    assert call(*compare).code == 0
    outcome = call(*compare)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "holds a comparison of all_reduce (finished): give another folder, or" in outcome.err
    (out / "notes.txt").touch()
    (out / "local_sgd-seed9").mkdir()
    (out / "local_sgd-seed9" / "config.json").touch()
    assert call(*compare, "--overwrite").code == 0
    assert {path.name for path in out.iterdir()} == {
        "config.json", "compare.json", "compare.png", "all_reduce-seed0", "notes.txt",
    }  # fmt: skip
    # A run does not go on in the folder of a comparison, either.
    before = (out / "config.json").read_bytes()
    for resume in ((), ("--resume",)):
        outcome = call("train", *TINY, "--data", text, "--out", out, *resume)
        assert outcome.code == 2
        assert "holds a comparison of all_reduce (finished): give another folder" in outcome.err
    assert (out / "config.json").read_bytes() == before
