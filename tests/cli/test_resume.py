"""`jaxslowmo train --resume`: to the bit where it was lost, and only what is the same run."""

import errno
import os
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cli.commands import QUICK, TINY, json_of, records, run, trajectory, write_text
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.cli import _setup
from jaxslowmo.cli._config import TrainConfig, flatten_options, option_types, replace_options
from jaxslowmo.cli._setup import learning_rate_schedule

# One run, which most tests copy: all on one worker.
pytestmark = pytest.mark.xdist_group("resumed")

RUN = f"{TINY} --slow-every 4 --replicas 2 --log-every 1 --eval-every 5 --learning-rate 0.2"
AVERAGES = "--sync-every 2"  # not of every algorithm


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 11 steps with checkpoints at 3, 6, 9 and 11, of which three are kept; its text."""
    folder = tmp_path_factory.mktemp("finished")
    text = write_text(folder / "text")
    options = "--steps 11 --checkpoint-every 3 --export"
    assert run(RUN, QUICK, AVERAGES, options, "--data", text, "--out", folder / "out") == 0
    assert steps_in(folder / "out") == [6, 9, 11]
    return folder


@pytest.fixture
def saved(finished, tmp_path):
    """A copy of both, to be changed."""
    return shutil.copytree(finished, tmp_path / "saved")


@pytest.fixture
def resume(call, saved):
    def resumed(*options, text="text"):
        return call("train --data", saved / text, "--out", saved / "out --resume", *options)

    return resumed


def steps_in(out):
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir())


def rates(out):
    return {r["step"]: r["learning_rate"] for r in trajectory(out) if "learning_rate" in r}


def rates_of(steps, length):
    values = {"learning_rate": 0.2, "warmup": 1, "steps": length}
    schedule = learning_rate_schedule(replace_options(TrainConfig(), values))
    return {step: pytest.approx(float(schedule(step - 1))) for step in steps}


def test_a_longer_run_keeps_the_length_of_the_schedule_unless_another_is_given(resume, saved):
    outcome = resume("--steps 13 --checkpoint-every 1")
    assert (outcome.code, outcome.err) == (0, "")
    said = "The schedule ends at step 11; then the rate stays 0.02. `schedule_steps: 13`"
    assert said in outcome.out
    # Warm-up and length are those of 11 steps; then it stays at a tenth of the peak.
    assert rates(saved / "out") == rates_of(range(1, 14), 11)
    assert resume("--steps 15", {"schedule_steps": 30}).code == 0
    assert rates(saved / "out") == rates_of(range(1, 14), 11) | rates_of([14, 15], 30)


def test_what_would_be_another_run_is_refused(resume, saved):
    """Before the arrays are read; what could be told once can be told again."""
    for path in (saved / "out" / "checkpoints" / "11" / "state").rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    resume("--steps 14 --warmup 3").is_refused("--warmup is 3, not 1")
    options = resume("--batch 4 --mode host --seed 3", {"nesterov": True})
    options.is_refused("--batch is 4, not 2", "--seed is 3, not 0", "--nesterov is True, not False")
    assert "--mode" not in options.err  # free
    (saved / "text" / "3.txt").write_text("Else.\n" * 200)
    resume().is_refused("read other files than --data has\n")
    (saved / "out" / "config.json").unlink()  # it is known by its checkpoint
    resume("--preset tiny --optimizer adamw").is_refused("--optimizer is adamw, not sgd")


@pytest.mark.filterwarnings("default:.* is damaged:UserWarning")
def test_a_damaged_checkpoint_or_record_names_the_way_out(resume, saved, monkeypatch):
    (saved / "text").rename(saved / "moved")  # the same text elsewhere
    largest = max((saved / "out/checkpoints/11").rglob("*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:10])
    outcome = resume(text="moved")
    outcome = outcome._replace(out="")  # it had begun
    outcome.is_refused("--resume: ", "checkpoints/11 is damaged", "--fallback takes that of step 9")
    outcome = resume("--fallback --checkpoint-every 1", text="moved")
    assert outcome.code == 0
    assert outcome.err.startswith("warning: ")
    assert "Using the checkpoint of step 9 instead." in outcome.err
    assert trajectory(saved / "out")[-1]["step"] == 11
    # The record alone is enough to refuse other options.
    (saved / "out/checkpoints/11/record/metadata").write_text("{")
    resume(text="moved").is_refused("--resume", "--fallback takes that of step 10")

    def unreadable(self, **_):
        raise CheckpointError("no answer", errno.ETIMEDOUT)

    monkeypatch.setattr(Checkpoints, "extra", unreadable)
    outcome = resume(text="moved")  # a file server that may answer later
    assert (outcome.code, outcome.err) == (75, "error: --resume: no answer\n")


# All options that one run can have away from their defaults; others name processes and folders.
ALL = {
    "preset": "tiny", "dtype": "bfloat16", "tied": True, "batch": 4, "accumulate": 2, "seed": 3,
    "algorithm": "slowmo_sgp", "slow_every": 4, "graph": "ring", "overlap": 1,
    "slow_momentum": 0.3, "slow_learning_rate": 0.9, "peers_per_step": 1, "nesterov": True,
    "mixing": "self_weighted:0.6", "merge": 0.1, "inner_state": "reset", "check_parameters": True,
    "codec": "bfloat16", "optimizer": "sgd", "learning_rate": 0.05, "warmup": 2, "clip": 0.5,
    "rate_schedule": "constant", "replicas": 2, "mesh": "device=2", "execution": "devices",
    "mode": "host", "steps": 6, "eval_every": 2, "log_every": 1, "tensorboard": True,
    "eval_batches": 2, "prefetch": 1, "checkpoint_every": 3, "export": True, "keep": 2,
    "max_failed_saves": 2, "on_nan": "rollback", "max_rollbacks": 2,
    "patience": 5, "statistics": True, "cluster": "none", "weight_decay": 0.2, "sync_every": 3,
    "outer_learning_rate": 0.6, "outer_momentum": 0.8, "bucket_mib": 1.0, "loss_scale": 8.0,
    "loss_scale_interval": 9, "schedule": "gpipe", "schedule_steps": 6, "restarts": 1,
    "heartbeat_timeout": 9, "startup_timeout": 9, "stall_timeout": 9, "quorum": 2,
    "deadline_seconds": 9.0, "late": "carry", "process_logs": True, "shard_state": False,
}  # fmt: skip
LEFT_OUT = {
    "data", "out", "config", "fallback", "overwrite", "resume", "dry_run", "islands", "island",
    "coordinator", "coordinator_bind", "num_processes", "process_id", "microbatches", "chunks",
    "executor", "attention", "exact_average", "delay", "fragments",
}  # fmt: skip


@pytest.mark.usefixtures("standard_promotion")  # flax's LayerNorm in half precision
def test_a_run_whose_config_holds_each_option_resumes_to_the_bit(call, text, tmp_path):
    defaults = flatten_options(TrainConfig())
    assert ALL.keys() | LEFT_OUT == option_types(TrainConfig).keys()
    assert [name for name in ALL if ALL[name] == defaults[name]] == []
    done = call("train", ALL, "--data", text, "--out", tmp_path / "whole")
    assert done.code == 0, done.err
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    assert {name: json_of(tmp_path / "whole/config.json")[name] for name in ALL} == ALL
    shutil.rmtree(tmp_path / "parts/checkpoints/6")
    done = call("train --resume --data", text, "--out", tmp_path / "parts")
    assert done.code == 0, done.err
    assert "Resumed at step 3." in done.out
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    same = ("loss", "validation_loss", "bytes_sent", "steps", "status", "best_step")
    then, now = (json_of(tmp_path / name / "summary.json") for name in ("whole", "parts"))
    assert {key: now[key] for key in same} == {key: then[key] for key in same}
    assert json_of(tmp_path / "parts/config.json") == json_of(tmp_path / "whole/config.json")


def test_rolling_back_leaves_out_the_batches(call, text, tmp_path, monkeypatch):
    """A batch that makes the loss NaN, at a step that has a checkpoint before it."""
    usual, usual_loss = _setup.Text.batch, _setup.gpt_loss_fn

    def batch(self, index):
        return np.full_like(usual(self, index), 255 if index == 4 else 7)

    def poisoned(*args):
        loss_fn = usual_loss(*args)
        return lambda p, batch: jnp.where((batch == 255).any(), jnp.nan, loss_fn(p, batch))

    monkeypatch.setattr(_setup.Text, "batch", batch)
    monkeypatch.setattr(_setup, "gpt_loss_fn", poisoned)
    out = tmp_path / "out"
    options = "--checkpoint-every 2 --steps 7 --data"
    outcome = call(RUN, QUICK, {"on_nan": "rollback"}, AVERAGES, options, text, "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    lines = records(out)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert lines[5]["loss"] is None
    assert lines[6]["rolled_back_from"] == 5
    assert np.isfinite(lines[-1]["loss"])
    # Of those loaded ahead none was left out: 7 steps and the one that was taken back.
    assert Checkpoints(out / "checkpoints").extra()["progress"]["next_batch"] == 8


def test_sigterm_saves_and_is_no_failure(call, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    usual = _setup.Text.batch

    def batch(self, index):
        if index == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(self, index)

    monkeypatch.setattr(_setup.Text, "batch", batch)
    outcome = call(RUN, QUICK, AVERAGES, "--data", text, "--out", out, "--resume --steps 100000")
    assert (outcome.code, outcome.err) == (0, "")
    assert "no checkpoint" in outcome.out  # it begins where there is nothing to go on from
    (step,) = steps_in(out)
    assert trajectory(out)[-1]["step"] == step
    assert f"Saved at step {step}; --resume goes on from there." in outcome.out
    assert json_of(out / "summary.json")["status"] == "preempted"


def test_failed_saves_end_a_run_only_if_they_are_many(call, text, tmp_path, monkeypatch):
    saves, failing = [], {1}
    usual = ocp.PyTreeCheckpointHandler.finalize

    def finalize(*args, **options):
        saves.append(1)
        if len(saves) in failing:
            raise OSError(errno.EIO, "as the test says")
        return usual(*args, **options)

    def saved(out, steps):
        options = f"--checkpoint-every 2 --steps {steps} --data"
        few = {"max_failed_saves": 2}
        return call(RUN, QUICK, AVERAGES, few, options, text, "--out", tmp_path / out)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", finalize)
    outcome = saved("first", 6)
    assert outcome.code == 0
    assert "step 2 could not be written" in outcome.err
    assert steps_in(tmp_path / "first") == [4, 6]
    failing |= {4, 5}
    outcome = saved("twice", 6)
    assert outcome.code == 75
    assert outcome.err.endswith("twice/checkpoints; 2 saves in a row have failed\n")
