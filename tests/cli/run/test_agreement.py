"""A run goes on with the options and the text that it had, and with other steps if asked to."""

import errno
import os
import shutil

import numpy as np
import pytest

from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.cli import main
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._agreement import option_values, other_files, other_options
from jaxslowmo.cli.run._recipes import learning_rate_schedule
from support.metrics import trajectory

# One run, which most tests copy: all on one worker.
pytestmark = pytest.mark.xdist_group("alike")

TINY = (
    "train", "--preset", "tiny", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd",
    "--clip", 0, "--slow-every", 4, "--replicas", 2, "--log-every", 1, "--learning-rate", 0.2,
)  # fmt: skip
AVERAGES = ("--sync-every", 2)  # not of every algorithm


def rates(folder):
    return {r["step"]: r["learning_rate"] for r in trajectory(folder) if "learning_rate" in r}


def rates_of(steps, length, warmup):
    config = train_config({"learning_rate": 0.2, "warmup": warmup, "steps": 99}).optimizer
    schedule = learning_rate_schedule(config, length)
    return {step: pytest.approx(float(schedule(step - 1))) for step in steps}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 20 steps with a checkpoint at 10, and the text that it read."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text").mkdir()
    for i in range(10):
        (folder / "text" / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 40)
    options = ("--steps", 20, "--checkpoint-every", 10)
    argv = [*TINY, *AVERAGES, *options, "--data", folder / "text", "--out", folder / "out"]
    with pytest.raises(SystemExit) as left:
        main([str(x) for x in argv])
    assert left.value.code == 0
    return folder


@pytest.fixture
def saved(finished, tmp_path):
    """A copy of both, to be changed."""
    return shutil.copytree(finished, tmp_path / "saved")


@pytest.fixture
def resume(call, saved):
    def run(*options, data=saved / "text", averages=AVERAGES):
        given = ("--data", data, "--out", saved / "out", "--resume")
        return call(*TINY, *averages, *given, *options)

    return run


def test_a_longer_run_keeps_the_length_of_the_schedule(resume, saved, finished):
    assert rates(finished / "out") == rates_of(range(1, 21), 20, 2)
    outcome = resume("--steps", 24)
    assert (outcome.code, outcome.err) == (0, "")
    said = (
        "The schedule ends at step 20; then the rate stays 0.02. --schedule-steps 24 stretches it."
    )
    assert said in outcome.out
    found = rates(saved / "out")
    # Warm-up and length are those of 20 steps; then it stays at a tenth of the peak.
    assert found == rates_of(range(1, 25), 20, 2)
    assert found[24] == pytest.approx(0.02)
    # And once more, of what the longer run has saved.
    assert resume("--steps", 26, "--checkpoint-every", 1).code == 0
    assert rates(saved / "out") == rates_of(range(1, 27), 20, 2)


def test_an_interrupted_run_is_unchanged_to_the_bit(resume, saved, finished):
    for steps in (("--steps", 20), ()):  # not given: what they were
        shutil.rmtree(saved / "out" / "checkpoints" / "20")
        outcome = resume(*steps, "--checkpoint-every", 10)
        assert (outcome.code, outcome.err) == (0, "")
        assert "Resumed at step 10." in outcome.out
        assert trajectory(saved / "out") == trajectory(finished / "out")


def test_another_schedule_is_used_if_asked_for(resume, saved):
    assert resume("--steps", 24, "--schedule-steps", 30).code == 0
    assert rates(saved / "out") == rates_of(range(1, 21), 20, 2) | rates_of(range(21, 25), 30, 2)


def test_fewer_steps_than_were_done(resume, saved):
    outcome = resume("--steps", 19)
    assert outcome.code == 2
    assert outcome.err == (
        f"error: --steps must be >= 20, the steps that the run in {saved / 'out'} has done, got 19"
        "\n"
    )


def test_the_warm_up_that_was_not_given_is_what_it_was_and_another_is_refused(resume):
    outcome = resume("--steps", 24, "--warmup", 3)
    assert outcome.code == 2
    assert "had other options: --warmup was 2, is 3" in outcome.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"3.txt": None}, "3.txt is missing"),
        ({"new.txt": "Something.\n"}, "new.txt is new"),
        ({"3.txt": "Else.\n" * 200}, "3.txt has other bytes"),
        ({"3.txt": "\0"}, "3.txt is binary"),
        ({"0.txt": "a", "1.txt": None}, "0.txt has other bytes, 1.txt is missing"),
    ],
)
def test_other_text_is_refused_by_name(resume, saved, change, words):
    for name, content in change.items():
        path = saved / "text" / name
        path.unlink() if content is None else path.write_text(content)
    for _ in range(2):  # what could be told once can be told again
        outcome = resume("--steps", 21)
        assert outcome.code == 2
        assert outcome.err == (
            f"error: --resume: the run in {saved / 'out'} read other files than --data has: "
            f"{words}\n"
        )
    (saved / "out" / "corpus.json").unlink()
    assert resume("--steps", 21).err.endswith(" read other files than --data has\n")


def test_the_same_text_elsewhere(resume, saved):
    (saved / "text").rename(saved / "moved")
    outcome = resume("--steps", 21, data=saved / "moved")
    assert (outcome.code, outcome.err) == (0, "")


def test_the_check_comes_before_the_arrays_are_read(resume, saved):
    for path in (saved / "out" / "checkpoints" / "20" / "state").rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    outcome = resume("--algorithm", "slowmo_sgp", averages=())
    assert "--algorithm was slowmo, is slowmo_sgp" in outcome.err
    assert "is damaged" in resume().err


def test_a_damaged_record(resume, saved):
    (saved / "out" / "checkpoints" / "20" / "record" / "metadata").write_text("{")
    other = ("--algorithm", "slowmo_sgp")
    outcome = resume(*other, averages=())
    assert outcome.code == 2
    assert "--resume" in outcome.err
    assert "--fallback takes that of step 10" in outcome.err
    outcome = resume(*other, "--fallback", averages=())
    assert "--algorithm was slowmo, is slowmo_sgp" in outcome.err


def test_a_file_server_that_does_not_answer_is_tried_again(resume, monkeypatch):
    def unreadable(self, **_):
        raise CheckpointError("no answer", errno.ETIMEDOUT)

    monkeypatch.setattr(Checkpoints, "extra", unreadable)
    outcome = resume()
    assert (outcome.code, outcome.err) == (75, "error: --resume: no answer\n")


def test_options_that_one_of_the_versions_does_not_know(resume, saved, monkeypatch):
    extra = Checkpoints.extra

    def of_another_version(self, **kwargs):
        found = extra(self, **kwargs)
        del found["config"]["optimizer"]["schedule_steps"], found["config"]["overwrite"]
        del found["config"]["accumulate"], found["config"]["not_given"]
        found["config"] |= {"prefetch": 2, "tuning": {"unheard_of": True}}
        return found

    monkeypatch.setattr(Checkpoints, "extra", of_another_version)
    assert resume("--steps", 21).code == 0
    assert rates(saved / "out") == rates_of(range(1, 22), 20, 2)
    assert "--accumulate was 1, is 2" in resume("--steps", 21, "--accumulate", 2).err


def test_extra_needs_no_arrays(saved):
    checkpoints = Checkpoints(saved / "out" / "checkpoints")
    shutil.rmtree(saved / "out" / "checkpoints" / "20" / "state")
    assert checkpoints.extra()["progress"]["step"] == 20
    assert checkpoints.extra(step=10)["progress"]["step"] == 10


def test_options_between_processes():
    first = option_values(train_config({"steps": 9, "learning_rate": 0.1}))
    free = {"data": "/a", "process_id": 1, "num_processes": 2, "coordinator": "a:1"}
    free |= {"resume": True, "startup_timeout": 5, "process_logs": True, "restarts": 3}
    same = option_values(train_config({"steps": 9, "learning_rate": 0.1} | free))
    assert other_options(same, first) == ""
    other = option_values(train_config({"steps": 10, "learning_rate": 0.01, "log_every": 3}))
    assert other_options(other, first) == (
        "--steps is 10, is 9 there; --log-every is 3, is 10 there; "
        "--learning-rate is 0.01, is 0.1 there; --warmup is 1, is 0 there"
    )


def test_files_that_differ_are_named_up_to_five():
    there = {"a": "3 xyz", "b": "4 xyz", "c": "binary", "": "1 x"}
    here = {"a": "3 abc", "b": "a duplicate of a", "c": "1 y", "d": "empty"}
    assert other_files(here, there) == (
        "the file is missing, a has other bytes, b is a duplicate of a, c is not binary, d is new"
    )
    many = {f"{i}": "1 x" for i in np.arange(9)}
    assert other_files(many, {}).endswith("4 is new, and 4 more")
