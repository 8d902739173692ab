"""Runs that older versions saved go on: tests/golden holds what each of them left."""

import tarfile
from pathlib import Path

import pytest

from cli.commands import json_of, records
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.checkpoint._arrays import prints_of
from jaxslowmo.checkpoint._record import as_stored
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._division import choose_mesh, divide_text
from jaxslowmo.cli.run._job import Job
from jaxslowmo.data import read_corpus
from jaxslowmo.models import gpt_preset, init_gpt

GOLDEN = Path(__file__).parents[2] / "golden"
OPTIONS = {
    "preset": "tiny", "replicas": 2, "algorithm": "slowmo_sgp", "slow_every": 5, "steps": 16,
    "log_every": 1, "eval_every": 4, "optimizer": "sgd", "clip": 0.0, "data": "text",
}  # fmt: skip


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The folder of the run of 0.1.0, with the text that it read beside it."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open(GOLDEN / "checkpoint_0.1.0" / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 60)
    return tmp_path / "out"


def losses(folder):
    return {line["step"]: line["loss"] for line in records(folder) if "loss" in line}


def test_a_run_of_0_1_0_goes_on_as_it_went_then(old_run, call):
    then = losses(old_run)
    outcome = call("sample", old_run, "--tokens 5 --prompt File")
    assert (outcome.code, outcome.out[:4]) == (0, "File")
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in OPTIONS.items()]
    outcome = call("train", *flags, "--out", old_run, "--resume")
    assert (outcome.code, outcome.err) == (0, "")
    assert "Resumed at step 12." in outcome.out
    now = losses(old_run)
    assert sorted(now) == sorted(then) == list(range(1, 17))
    assert now == pytest.approx(then, rel=1e-5)


def test_a_checkpoint_of_0_1_0_gives_what_was_saved(old_run):
    config = train_config(OPTIONS)
    placement = choose_mesh(config)
    job = Job(config, placement, divide_text(config, read_corpus(config.data), placement.mesh))
    params = init_gpt(gpt_preset("tiny", dtype="float32"), config.seed)
    with Checkpoints(old_run / "checkpoints") as checkpoints:
        found = checkpoints.restore(job.step, params)
    saved = json_of(old_run / "checkpoints" / "12" / "record" / "metadata")
    assert (found.step, found.is_exact, saved["versions"]["jaxslowmo"]) == (12, True, "0.1.0")
    assert prints_of(as_stored(found.state)) == saved["prints"]
