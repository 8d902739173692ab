"""`jaxslowmo train` from its options to its files: metrics, bytes, statistics, and how it ends."""

import jax
import numpy as np
import pytest

import jaxslowmo as js
from cli.commands import QUICK, TINY, curves, json_of, records, trajectory
from jaxslowmo.checkpoint import load_consensus
from jaxslowmo.cli._record import format_bytes


@pytest.mark.parametrize(
    ("algorithm", "periods"),
    [("local_sgd", "--sync-every 2"), ("slowmo_sgp", "--slow-every 4")],
)
def test_a_run_leaves_metrics_config_and_summary(call, text, tmp_path, algorithm, periods):
    out = tmp_path / "out"
    outcome = call(
        TINY, QUICK, periods, "--algorithm", algorithm, "--data", text, "--out", out,
        "--steps 9 --eval-every 4 --log-every 2 --learning-rate 0.2 --tensorboard",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "validation loss of the consensus" in outcome.out
    last = [f"Results in {out}, its loss drawn in loss.png", f"jaxslowmo sample {out}"]
    assert [*map(str.endswith, outcome.out.splitlines()[-2:], last)] == [True] * 2
    assert {path.name for path in out.iterdir()} == {
        "checkpoints", "config.json", "loss.png", "metrics.jsonl", "summary.json", "tensorboard",
    }  # fmt: skip
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["9"]

    found = records(out)
    assert [record["step"] for record in found] == [0, 1, 2, 4, 6, 8, 9]
    assert [r["step"] for r in found if "validation_loss" in r] == [0, 4, 8, 9]
    assert found[-1]["validation_loss"] < found[0]["validation_loss"]
    shown = curves(out)
    assert shown["loss"] == {r["step"]: pytest.approx(r["loss"]) for r in found[1:]}
    assert sorted(shown["validation_loss"]) == [0, 4, 8, 9]
    # Cosine from the peak at the first step, without a warm-up, down to a tenth after the last.
    cosine = [0.02 + 0.09 * (1 + np.cos(np.pi * t / 9)) for t in (0, 1, 3, 5, 7, 8)]
    np.testing.assert_allclose([r["learning_rate"] for r in found[1:]], cosine, rtol=1e-5)
    assert found[1]["tokens_per_second"] is None  # it compiled
    assert found[-1]["tokens_per_second"] > 0

    summary = json_of(out / "summary.json")
    assert (summary["status"], summary["steps"]) == ("finished", 9)
    assert summary["loss"] == found[-1]["loss"]
    assert summary["validation_loss"] == found[-1]["validation_loss"]
    losses = {r["validation_loss"]: r["step"] for r in found if "validation_loss" in r}
    assert (summary["best_validation_loss"], summary["best_step"]) == min(losses.items())
    # Replicas hold no sharded state, so each leaf is sent whole.
    size = 4 * summary["parameters"]
    once = size * 2 * 3 // 4  # a ring all-reduce of float32 over 4 replicas
    by_kind = summary["bytes_per_step_by_kind"]
    if algorithm == "local_sgd":
        assert by_kind == {"local": 0, "average": once}
        sent = [step // 2 * once for step in range(10)]
    else:
        # Shards are padded to equal parts.
        assert once <= by_kind["slow"] <= 1.1 * once + 4096 * 4 * 2
        sent = [step // 4 * by_kind["slow"] + (step - step // 4) * size for step in range(10)]
    assert [r["bytes_sent"] for r in found] == [sent[r["step"]] for r in found]
    assert summary["bytes_sent"] == sent[9]


def test_gossip_is_exported_with_what_is_in_flight(call, text, tmp_path, monkeypatch):
    masses = []

    class Watched(js.train.Evaluate):
        def __call__(self, result):
            params, gossip = result.state.params, result.state.exchange.local
            terms = [(gossip.weight, params), *((a.weight, a.mean) for a in gossip.in_flight)]
            masses.append(jax.tree.map(lambda x: np.asarray(x, np.float64), terms))
            return super().__call__(result)

    monkeypatch.setattr(js.train, "Evaluate", Watched)
    outcome = call(
        TINY, QUICK, "--algorithm sgp --overlap 2 --data", text, "--out", tmp_path, "--steps 3",
        "--replicas 2 --learning-rate 0.5 --checkpoint-every 3 --export",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    weights, trees = zip(*masses[-1], strict=True)
    total = sum(w.sum() for w in weights)
    exported = load_consensus(tmp_path / "model").values()
    apart = []
    for leaf, *parts in zip(exported, *map(jax.tree.leaves, trees), strict=True):
        exact = sum(np.tensordot(w, x, 1) for w, x in zip(weights, parts, strict=True)) / total
        np.testing.assert_allclose(leaf, exact, rtol=1e-5, atol=1e-7)
        apart.append(np.abs(parts[0].mean(0) - leaf).max())
    assert max(apart) > 1e-3


def test_virtual_replicas_learn_the_same_and_statistics_measure_every_kind(call, text, tmp_path):
    summaries = []
    for execution, more in (("devices", {"statistics": True}), ("virtual", {})):
        out = tmp_path / execution
        outcome = call(
            TINY, QUICK, "--steps 12 --algorithm local_sgd --sync-every 6 --learning-rate 0.2",
            "--data", text, "--out", out, "--execution", execution, more,
        )  # fmt: skip
        assert outcome.code == 0
        assert ("would send" in outcome.out) == (execution == "virtual")
        summaries.append(json_of(out / "summary.json"))
        assert ("12 steps, 11 measured; 4 cpu devices" in outcome.out) == bool(more)
    devices, virtual = summaries
    assert virtual["bytes_are_hypothetical"] > devices["bytes_are_hypothetical"]
    assert virtual["bytes_sent"] == devices["bytes_sent"] > 0
    assert virtual["validation_loss"] == pytest.approx(devices["validation_loss"], abs=1e-4)
    record = json_of(tmp_path / "devices" / "statistics.json")
    measured = {name: kind["measured"] for name, kind in record["kinds"].items()}
    assert sum(measured.values()) == 11
    assert record["average"]["backward_compute_time"] > 0
    assert set(record["average"]["communication"]) == {"average"}


def test_a_loss_that_is_not_finite_stops_the_run(call, text, tmp_path):
    out = tmp_path / "out"
    outcome = call(
        TINY, QUICK, "--data", text, "--out", out, "--steps 50 --log-every 1 --warmup 0",
        "--learning-rate 1e38 --algorithm local_sgd",
    )  # fmt: skip
    assert outcome.code == 1
    assert "The loss is not finite at step" in outcome.out
    assert "lower --learning-rate" in outcome.out
    summary = json_of(out / "summary.json")
    assert summary["status"] == "diverged"
    assert summary["steps"] == len(records(out)) - 1 < 50
    assert records(out)[-1]["loss"] is None


def test_patience_ends_a_run_that_does_not_improve(call, text, tmp_path):
    """At a rate of 0, so the evaluation of the start stays the best one."""
    out = tmp_path / "out"
    start = None
    for patience, resume, steps in ((1, "", 2), (2, "--resume", 4)):
        outcome = call(
            TINY, QUICK, "--replicas 2 --algorithm local_sgd --learning-rate 0 --eval-every 2",
            "--data", text, "--log-every 3 --steps 100 --checkpoint-every 50 --out", out, resume,
            {"patience": patience},
        )  # fmt: skip
        assert (outcome.code, outcome.err) == (0, "")
        assert "Stopped early: the smallest validation loss, 5.5" in outcome.out
        assert "was that of step 0. A resumed run with a larger patience goes on." in outcome.out
        summary = json_of(out / "summary.json")
        assert (summary["status"], summary["stopped_early"]) == ("finished", True)
        assert summary["steps"] == steps  # it goes on counting
        start = start or trajectory(out)[0]["validation_loss"]
        assert (summary["best_step"], summary["best_validation_loss"]) == (0, start)


@pytest.mark.parametrize(
    ("algorithm", "periods"),
    [("sgp", ""), ("slowmo", "--sync-every 2 --slow-every 4")],
)
def test_a_dry_run_says_what_a_run_then_sends(call, text, tmp_path, algorithm, periods):
    options = f"--algorithm {algorithm} --replicas 2 --steps 4 {periods}"
    told = call(TINY, QUICK, options, "--dry-run")
    assert (told.code, told.err) == (0, "")
    assert [*tmp_path.iterdir()] == []
    assert ["devices", "2 replicas on 2 of 8 CPU devices"] in told.rows
    done = call(TINY, QUICK, options, "--data", text, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    summary = json_of(tmp_path / "out" / "summary.json")
    kinds = summary["bytes_per_step_by_kind"]
    lines = told.out.splitlines()
    sent = lines[lines.index("Each replica sends in a step, as progress lines count it:") + 1 :]
    assert sent == [f"  {kind}: {format_bytes(n)}" for kind, n in kinds.items()]
    assert f"4/4  loss {summary['loss']:.3f}" in done.out
    assert f"sent {format_bytes(summary['bytes_sent'])}\n" in done.out
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
