"""`jaxslowmo train` that is saved, resumed, stopped and rolled back."""

import errno
import json
import os
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxslowmo.checkpoint import Checkpoints, load_consensus
from jaxslowmo.cli import main
from jaxslowmo.cli.run import _job
from jaxslowmo.cli.run._keeper import Keeper
from support.metrics import trajectory
from support.waiting import PATIENCE_SECONDS

# One run, which most tests copy: all on one worker.
pytestmark = pytest.mark.xdist_group("checkpoints")

DEMO = (
    "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd",
    "--clip", 0, "--sync-every", 2, "--slow-every", 4, "--log-every", 1, "--eval-every", 5,
    "--steps", 11, "--learning-rate", 0.2,
)  # fmt: skip


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """As `text` of conftest.py, for the whole module."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    return folder


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    """A finished run with checkpoints at 3, 6, 9 and 11, of which the last three are kept."""
    out = tmp_path_factory.mktemp("finished") / "out"
    every = ("--checkpoint-every", 3, "--export")
    argv = [str(x) for x in (*DEMO, "--data", texts, "--out", out, *every)]
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0
    assert steps_in(out) == [6, 9, 11]
    return out


@pytest.fixture
def saved(finished, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(finished, tmp_path / "saved")


@pytest.mark.parametrize(
    "ahead", [pytest.param(("--prefetch", 0), marks=pytest.mark.exhaustive), ("--prefetch", 7)]
)
def test_a_resumed_run_is_the_undisturbed_one(call, texts, finished, saved, ahead):
    """Whatever each of the two had loaded ahead; the first has loaded two batches."""
    for step in (9, 11):  # as if it had been lost then, with metrics of later steps
        shutil.rmtree(saved / "checkpoints" / str(step))
    outcome = call(*DEMO, "--data", texts, "--out", saved, "--resume", *ahead)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Resumed at step 6." in outcome.out
    assert trajectory(saved) == trajectory(finished)
    assert '"resumed": []' in (saved / "metrics.jsonl").read_text()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (finished, saved)]
    for key in ("loss", "validation_loss", "bytes_sent", "steps"):
        assert summaries[0][key] == summaries[1][key]


def test_a_finished_run_that_is_started_again_is_told_as_it_was(call, texts, finished, saved):
    assert call(*DEMO, "--data", texts, "--out", saved, "--resume").code == 0
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (finished, saved)]
    for key in ("loss", "validation_loss", "bytes_sent", "steps", "status"):
        assert summaries[0][key] == summaries[1][key]


def test_another_number_of_replicas(call, texts, saved):
    for step in (9, 11):
        shutil.rmtree(saved / "checkpoints" / str(step))
    outcome = call(
        *DEMO, "--data", texts, "--out", saved, "--resume", "--replicas", 3, "--keep", 1,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    lines = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    (resumed,) = (line for line in lines if "resumed" in line)
    assert resumed["step"] == 6
    assert any("consensus" in sentence for sentence in resumed["resumed"])
    assert lines[-1]["step"] == 11
    for sentence in resumed["resumed"]:
        assert " ".join(sentence.split()) in " ".join(outcome.out.split())


def test_without_a_checkpoint_it_starts(call, text, tmp_path):
    outcome = call(*DEMO, "--data", text, "--out", tmp_path / "new", "--resume", "--steps", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert "no checkpoint" in outcome.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--mode", "host", "--nesterov"), "other options: --nesterov was False, is True"),
        (("--batch", 4, "--seed", 3), "other options: --batch was 2, is 4; --seed was 0, is 3"),
    ],
)
def test_other_options_are_refused(call, texts, saved, change, words):
    outcome = call(*DEMO, *change, "--data", texts, "--out", saved, "--resume")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert words in outcome.err


@pytest.mark.filterwarnings("default:.* is damaged:UserWarning")
def test_a_damaged_checkpoint(call, texts, saved):
    largest = max((saved / "checkpoints" / "11").rglob("*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:10])
    resume = (*DEMO, "--data", texts, "--out", saved, "--resume")
    outcome = call(*resume)
    assert outcome.code == 2
    assert outcome.err.startswith("error: --resume: ")
    assert "checkpoints/11 is damaged" in outcome.err
    assert outcome.err.rstrip().endswith("--fallback takes that of step 9.")
    outcome = call(*resume, "--fallback")
    assert outcome.code == 0
    assert "warning: " in outcome.err
    assert "Using the checkpoint of step 9 instead." in outcome.err
    assert trajectory(saved)[-1]["step"] == 11


def test_rolling_back_leaves_out_the_batches(call, texts, tmp_path, monkeypatch):
    """A batch that makes the loss NaN, at a step that has a checkpoint before it."""
    usual = _job.RunBatches.batch
    monkeypatch.setattr(
        _job.RunBatches,
        "batch",
        lambda self, index: np.full_like(usual(self, index), 255 if index == 4 else 7),
    )
    usual_loss = _job.loss_fn_of

    def poisoned(*args):
        loss_fn = usual_loss(*args)
        return lambda p, batch: jnp.where((batch == 255).any(), jnp.nan, loss_fn(p, batch))

    monkeypatch.setattr(_job, "loss_fn_of", poisoned)
    out = tmp_path / "out"
    run = (*DEMO, "--data", texts, "--checkpoint-every", 2, "--out", out, "--steps", 7)
    outcome = call(*run, "--on-nan", "rollback")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert lines[5]["loss"] is None
    assert lines[6]["rolled_back_from"] == 5
    assert np.isfinite(lines[-1]["loss"])
    # Of those loaded ahead none was left out: 7 steps and the one that was taken back.
    assert Checkpoints(out / "checkpoints").extra()["progress"]["next_batch"] == 8


def test_export(finished):
    params = load_consensus(finished / "model")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    summary = json.loads((finished / "summary.json").read_text())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == summary["parameters"]


def test_sigterm_saves_and_is_no_failure(call, texts, tmp_path):
    out = tmp_path / "out"
    metrics = out / "metrics.jsonl"

    def terminate():
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    outcome = call(*DEMO, "--data", texts, "--out", out, "--steps", 100000)
    sender.join()
    assert (outcome.code, outcome.err) == (0, "")
    (step,) = steps_in(out)
    assert trajectory(out)[-1]["step"] == step
    assert f"Saved at step {step}; --resume goes on from there." in outcome.out


def test_a_signal_during_the_last_save_waits_for_it(call, text, tmp_path, monkeypatch):
    usual, asked = Keeper._settle, []

    def while_it_is_written(self, *, is_last=False):
        if is_last and not asked:
            for number in (signal.SIGTERM, signal.SIGINT):
                asked.append(signal.getsignal(number))
                assert asked[-1] != signal.SIG_DFL  # would end these tests
                signal.raise_signal(number)
        usual(self, is_last=is_last)

    monkeypatch.setattr(Keeper, "_settle", while_it_is_written)
    out = tmp_path / "out"
    outcome = call(*DEMO, "--data", text, "--out", out, "--checkpoint-every", 4)
    assert len(asked) == 2
    assert (outcome.code, outcome.err) == (0, "")
    assert steps_in(out) == [4, 8, 11]
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"


def test_a_last_save_that_fails_hides_no_error_of_before(call, text, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(errno.EIO, "as the test says")

    usual = _job.Session.train

    def train(self, *args):
        usual(self, *args)
        raise ValueError("a mistake")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
    monkeypatch.setattr(_job.Session, "train", train)
    with pytest.raises(ValueError, match="a mistake"):
        call(*DEMO, "--data", text, "--out", tmp_path / "out", "--checkpoint-every", 11)
    said = "warning: the checkpoint of step 11 could not be written: Input/output error"
    assert said in capsys.readouterr().err


def test_all_reduce_has_no_parameters_to_check(call, text, tmp_path):
    outcome = call(
        "train", "--preset", "tiny", "--data", text, "--algorithm", "all_reduce",
        "--check-parameters", "--out", tmp_path / "out",
    )  # fmt: skip
    assert outcome.code == 2
    assert "--check-parameters is for algorithms that exchange parameters" in outcome.err
