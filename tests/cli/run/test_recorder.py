"""The best evaluation, and a run that ends where none is better for some time."""

import json

import pytest

from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.cli.run._keeper import Progress
from jaxslowmo.cli.run._recorder import Best
from support.metrics import trajectory


def test_the_first_of_the_smallest_losses_counts():
    best = Best()
    for step, loss in enumerate((3.0, 2.0, 2.0, float("nan"), 2.5)):
        best = best.after(step, loss)
    assert best == Best(1, 2.0, since=3)
    assert [best.has_lasted(patience) for patience in (0, 1, 3, 4)] == [False, True, True, False]
    assert best.after(5, 1.0) == Best(5, 1.0)
    assert not Best().has_lasted(1)


def test_a_checkpoint_tells_of_it_and_one_of_an_older_version_does_not():
    progress = Progress(4, 5, 6, Best(2, 1.5, since=1))
    extra = json.loads(json.dumps(progress.extra()))
    assert extra["progress"] == {"step": 4, "next_batch": 5, "bytes_sent": 6}
    assert Progress.of(extra) == progress
    del extra["best"]
    assert Progress.of(extra) == Progress(4, 5, 6)


# Nothing improves at a rate of 0, so the evaluation of the start stays the best one.
STANDING = (
    "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd", "--clip",
    0, "--replicas", 2, "--algorithm", "local_sgd", "--learning-rate", 0, "--eval-every", 2,
    "--log-every", 3,
)  # fmt: skip


@pytest.fixture
def standing(call, text, tmp_path):
    def run(*options):
        out = tmp_path / "out"
        outcome = call(*STANDING, "--data", text, "--out", out, *options)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out, json.loads((out / "summary.json").read_text())

    return run


def test_patience(standing, tmp_path):
    out = tmp_path / "out"
    patience = ("--steps", 100, "--checkpoint-every", 50, "--patience")
    said, summary = standing(*patience, 2)
    assert "Stopped early: the smallest validation loss, 5.5" in said
    assert "was that of step 0. --resume with a larger --patience goes on." in said
    assert (summary["status"], summary["steps"], summary["stopped_early"]) == ("finished", 4, True)
    start = trajectory(out)[0]["validation_loss"]
    assert (summary["best_step"], summary["best_validation_loss"]) == (0, start)
    # It is saved there, and a start with as much patience does no step more.
    extra = Checkpoints(out / "checkpoints").extra(step=4)
    assert extra["best"] == {"step": 0, "validation_loss": start, "since": 2}
    said, summary = standing(*patience, 2, "--resume")
    assert (summary["steps"], summary["stopped_early"]) == (4, True)
    # With more it goes on counting.
    said, summary = standing(*patience, 3, "--resume")
    assert "Resumed at step 4." in said
    assert (summary["steps"], summary["stopped_early"]) == (6, True)
    # An old evaluation is told with its step.
    lines = [line for line in said.splitlines() if "/100" in line]
    assert lines
    assert all("validation 5.5" in line for line in lines if "loss" in line)


def test_without_patience_a_run_goes_to_its_end(standing):
    said, summary = standing("--steps", 7)
    assert "Stopped early" not in said
    assert (summary["steps"], summary["stopped_early"]) == (7, False)
