"""Tests of `jaxslowmo train`, its job, session and recorder: what it writes, shows and returns."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import load_consensus
from jaxslowmo.cli.run import _job
from support.waiting import PATIENCE_SECONDS

# SGD compiles faster than AdamW, and most of these tests' time is compilation.
DEMO = (
    "train", "--preset", "demo", "--eval-batches", 1, "--batch", 2, "--optimizer", "sgd",
    "--clip", 0,
)  # fmt: skip
AVERAGE, SLOW = ("--sync-every", 2), ("--slow-every", 4)
PERIODS = {
    "local_sgd": AVERAGE, "slowmo": (*AVERAGE, *SLOW), "slowmo_sgp": SLOW, "diloco": SLOW
}  # fmt: skip


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help_shows_the_usage_and_version_the_number(call):
    for argv in (["--help"], ["train", "--help"], ["compare", "--help"]):
        outcome = call(*argv)
        assert outcome.code == 0
        assert "Usage: jaxslowmo" in outcome.out
    assert "--slow-momentum" in call("train", "--help").out
    version = call("--version")
    assert version.code == 0
    assert version.out.startswith("jaxslowmo 0.")


# The code of slowmo and sgp also runs in slowmo_sgp and diloco.
@pytest.mark.parametrize("algorithm", ["all_reduce", "local_sgd", "slowmo_sgp", "diloco"])
def test_a_run_leaves_metrics_config_and_summary(call, text, tmp_path, algorithm):
    out = tmp_path / "out"
    outcome = call(
        *DEMO, *PERIODS.get(algorithm, ()), "--algorithm", algorithm, "--data", text, "--out", out,
        "--steps", 9, "--eval-every", 4, "--log-every", 2, "--learning-rate", 0.2,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "validation loss of the consensus" in outcome.out
    assert outcome.out.rstrip().endswith(f"Results in {out}")

    records = json_lines(out / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 4, 6, 8, 9]
    evaluated = [record["step"] for record in records if "validation_loss" in record]
    assert evaluated == [0, 4, 8, 9]
    assert records[-1]["validation_loss"] < records[0]["validation_loss"]
    assert records[1]["learning_rate"] == pytest.approx(0.2)
    assert records[1]["tokens_per_second"] is None  # it compiled
    assert records[-1]["tokens_per_second"] > 0

    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 9)
    assert summary["bytes_sent"] == records[-1]["bytes_sent"]
    size = 4 * summary["parameters"]
    once = size * 2 * 3 // 4  # a ring all-reduce of float32 over 4 replicas
    by_kind = summary["bytes_per_step_by_kind"]
    if algorithm == "all_reduce":
        assert by_kind == {"every": once}
        assert summary["bytes_sent"] == 9 * once
    elif algorithm == "local_sgd":
        assert by_kind == {"local": 0, "average": once}
        assert summary["bytes_sent"] == 4 * once
    elif algorithm == "sgp":
        assert by_kind == {"local": 0, "round 0": size, "round 1": size}
        assert summary["bytes_sent"] == 9 * size
    else:
        # Shards are padded to equal parts.
        assert once <= by_kind["slow"] <= 1.1 * once + 4096 * 4 * 2
        between = {"slowmo": 2 * once, "slowmo_sgp": 7 * size, "diloco": 0}[algorithm]
        assert summary["bytes_sent"] == 2 * by_kind["slow"] + between

    config = json.loads((out / "config.json").read_text())
    assert config["algorithm"]["algorithm"] == algorithm
    assert (config["steps"], config["optimizer"]["learning_rate"]) == (9, 0.2)


def test_gossip_is_evaluated_and_exported_with_what_is_in_flight(call, text, tmp_path, monkeypatch):
    out, masses = tmp_path / "out", []

    class Watched(js.Evaluate):
        def __call__(self, result):
            params, gossip = result.state.params, result.state.opt_state[-1]
            terms = [(gossip.weight, params), *((a.weight, a.mean) for a in gossip.in_flight)]
            masses.append(jax.tree.map(lambda x: np.asarray(x, np.float64), terms))
            return super().__call__(result)

    evaluated = []

    def evaluate(job, params, model_state=None):
        evaluated.append(jax.tree.leaves(jax.tree.map(np.asarray, params)))
        return {"validation_loss": 0.0}

    monkeypatch.setattr(js, "Evaluate", Watched)
    monkeypatch.setattr(_job.Job, "evaluate", evaluate)
    outcome = call(
        *DEMO, "--algorithm", "sgp", "--overlap", 2, "--data", text, "--out", out, "--steps", 3,
        "--learning-rate", 0.5, "--replicas", 2, "--checkpoint-every", 3, "--export",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    terms = masses[-1]
    total = sum(w.sum() for w, _ in terms)
    model = jax.tree.leaves(load_consensus(out / "model"))
    by_leaf = zip(*(jax.tree.leaves(x) for _, x in terms), strict=True)
    for evaluated_leaf, exported, parts in zip(evaluated[-1], model, by_leaf, strict=True):
        exact = sum(np.tensordot(w, x, 1) for (w, _), x in zip(terms, parts, strict=True)) / total
        np.testing.assert_allclose(evaluated_leaf, exact, rtol=1e-5, atol=1e-7)
        assert np.array_equal(exported, evaluated_leaf)
    plain = jax.tree.map(lambda x: x.mean(0), jax.tree.leaves(terms[0][1]))
    assert max(np.abs(a - b).max() for a, b in zip(plain, model, strict=True)) > 1e-3


def test_statistics_measure_every_kind_of_step(call, text, tmp_path):
    outcome = call(
        *DEMO, "--data", text, "--out", tmp_path / "out", "--steps", 12, "--sync-every", 6,
        "--algorithm", "local_sgd", "--statistics", "--statistics-rate", 11,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "12 steps, measured: 1-12; 4 cpu devices" in outcome.out
    assert "backward compute" in outcome.out
    record = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert {name: kind["measured"] for name, kind in record["kinds"].items()} == {
        "local": 10,
        "average": 2,
    }
    assert record["average"]["backward_compute_time"] > 0
    assert set(record["average"]["communication"]) == {"average"}


def test_virtual_replicas_learn_the_same_and_say_what_they_would_send(call, text, tmp_path):
    summaries = []
    for execution in ("devices", "virtual"):
        out = tmp_path / execution
        outcome = call(
            *DEMO, *PERIODS["slowmo"], "--data", text, "--out", out, "--steps", 8,
            "--execution", execution, "--learning-rate", 0.2,
        )  # fmt: skip
        assert outcome.code == 0
        assert ("would send" in outcome.out) == (execution == "virtual")
        summaries.append(json.loads((out / "summary.json").read_text()))
    devices, virtual = summaries
    assert virtual["bytes_are_hypothetical"]
    assert virtual["bytes_sent"] == devices["bytes_sent"] > 0
    assert virtual["validation_loss"] == pytest.approx(devices["validation_loss"], abs=1e-4)


def test_two_levels_accumulate_in_host_mode(call, text, tmp_path):
    outcome = call(
        *DEMO, "--data", text, "--out", tmp_path / "out", "--steps", 5,
        "--replicas", 2, "--devices-per-replica", 2, "--batch", 4, "--accumulate", 2,
        "--rate-schedule", "constant", "--mode", "host", "--dtype", "bfloat16",
        "--algorithm", "diloco", "--no-shard-state", "--slow-every", 2,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 replicas of 2 devices on 4 of 8 CPU devices" in outcome.out


def test_a_loss_that_is_not_finite_stops_the_run(call, text, tmp_path):
    out = tmp_path / "out"
    outcome = call(
        *DEMO, "--data", text, "--out", out, "--steps", 50, "--log-every", 1, "--warmup", 0,
        "--learning-rate", 1e38, "--algorithm", "local_sgd",
    )  # fmt: skip
    assert outcome.code == 1
    assert "The loss is not finite at step" in outcome.out
    assert "lower --learning-rate" in outcome.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert summary["steps"] < 50
    assert json_lines(out / "metrics.jsonl")[-1]["loss"] is None


@pytest.mark.usefixtures("quick_processes")
def test_ctrl_c_ends_cleanly_with_metrics_written(text, tmp_path):
    out = tmp_path / "out"
    program = (
        "import sys\n"
        "from jaxslowmo.cli import main\n"
        "from jaxslowmo.models import GPT_PRESETS, GPTConfig\n"
        "GPT_PRESETS['demo'] = GPTConfig(1, 2, 16, 16)\n"
        "main(sys.argv[1:])\n"
    )
    arguments = [
        *DEMO, "--data", text, "--out", out, "--steps", 10**6, "--log-every", 1,
        "--algorithm", "local_sgd", "--replicas", 2, "--optimizer", "adamw", "--clip", 1,
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "local_sgd: interrupted" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] == json_lines(metrics)[-1]["step"] > 0
