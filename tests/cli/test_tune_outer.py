"""`jaxslowmo tune outer`: what it trains, shows and writes, and what it refuses."""

import json

import numpy as np
import pytest

from jaxslowmo.cli._tune_outer import Row, Trial, advice, rows_table
from jaxslowmo.cli.config._commands import TuneOuterConfig
from jaxslowmo.cli.config._training import train_config

SMALL = ("--preset", "tiny", "--replicas", 2, "--batch", 2, "--steps", 6, "--eval-batches", 1)


def outer(call, *options):
    return call("tune", "outer", *SMALL, *options)


def test_it_trains_and_writes(call, tmp_path):
    outcome = outer(
        call, "--sync-every", 2, "--periods", "2,4", "--momenta", "0,0.4", "--rates", "0.7,1",
        "--factors", "0.5,1", "--seeds", "0,1", "--eval-every", 4, "--out", tmp_path / "out",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "16 runs of 6 steps for each of 2 periods" in outcome.out
    assert "2 virtual replicas" in outcome.out
    for text in ("Every 2: ", "Every 4: ", "plain average"):
        assert text in outcome.out
    assert (tmp_path / "out" / "tune.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["steps_done"] == 6
    rows = found["rows"]
    # Plain averages are momentum 0 at a rate of 1, which is not tried twice.
    assert len(rows) == 2 * 2 * 4
    means = [row["mean"] for row in rows]
    assert means == sorted(means)
    assert all(len(set(row["losses"])) == 2 for row in rows)


def test_a_run_of_it_has_the_loss_of_the_same_run_by_train(call, tmp_path):
    """Warm-up, clipping and cosine are those of `train`."""
    options = ("--warmup", 2)
    outcome = outer(
        call, *options, "--algorithm", "diloco", "--periods", 3, "--momenta", 0.5, "--rates", 0.6,
        "--factors", 0.25, "--seeds", 5, "--learning-rate", 0.004, "--out", tmp_path / "tuned",
    )  # fmt: skip
    assert outcome.code == 0
    call(
        "train", *SMALL, *options, "--learning-rate", 0.001, "--algorithm", "diloco",
        "--slow-every", 3, "--outer-momentum", 0.5, "--outer-learning-rate", 0.6, "--seed", 5,
        "--execution", "virtual", "--out", tmp_path / "trained",
    )  # fmt: skip
    rows = json.loads((tmp_path / "tuned" / "tune.json").read_text())["rows"]
    (loss,) = next(row["losses"] for row in rows if row["momentum"] == 0.5)
    summary = json.loads((tmp_path / "trained" / "summary.json").read_text())
    np.testing.assert_allclose(loss, summary["validation_loss"], rtol=1e-5)


@pytest.mark.parametrize(("stopped", "kept", "steps"), [(4, [2], 6), (2, [2], 3)])
def test_a_period_that_was_stopped_early_is_shown_alone_or_not_at_all(
    call, tmp_path, monkeypatch, stopped, kept, steps
):
    def run(self, progress, stop):
        is_stopped = self._period == stopped
        stop.reason = "interrupted" if is_stopped else None
        rows = [Row(self._period, 1.0, 1.0, m, (2.0 + m,), (2.0,)) for m in (0.0, 0.4)]
        return rows, 3 if is_stopped else 6

    monkeypatch.setattr(Trial, "run", run)
    options = ("--periods", "2,4", "--seeds", 0, "--out", tmp_path / "out")
    outcome = outer(call, "--sync-every", 2, *options)
    assert outcome.code == 130
    assert f"these are losses after {steps} of 6 steps" in outcome.out
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["steps_done"] == steps
    assert sorted({row["period"] for row in found["rows"]}) == kept


CONFIG = TuneOuterConfig(
    train_config({"algorithm": "slowmo"}), momenta=(0.2, 0.5, 0.8), factors=(0.5, 1.0)
)


def test_advice_says_whether_a_setting_beats_plain_averages():
    def said(*losses):
        plain = (2.0, 2.0, 2.0)
        rows = [Row(48, 1.0, 1.0, 0.5, losses, plain), Row(48, 1.0, 1.0, 0.0, plain, plain)]
        return advice(CONFIG, sorted(rows, key=lambda row: row.mean))

    (better,) = said(1.5, 1.6, 1.7)
    assert "js.slowmo(..., momentum=0.5, slow_learning_rate=1)" in better
    assert "1.600, plain averages 2.000; it is smaller with 3 of 3 seeds" in better
    assert "At the end of what was tried: --factors 1; try more" in better
    for losses in [(1.0, 2.1, 2.1), (2.1, 2.2, 2.3), (1.0, 1.0, float("nan"))]:
        assert said(*losses) == ["Every 48: no setting beats plain averages, 2.000."]


def test_the_table_keeps_plain_averages_however_long_it_is():
    rows = [Row(48, 1.0, 1.0, n / 100, (1 + n,), (99.0,)) for n in range(1, 40)]
    rows.append(Row(48, 1.0, 1.0, 0.0, (99.0,), (99.0,)))
    assert rows_table(rows).row_count == 21


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--algorithm", "local_sgd"), "--algorithm must be one of slowmo, slowmo_sgp, diloco"),
        (("--replicas", 1), "--replicas must be >= 2"),
        (("--periods", "4,48"), "--periods must be <= --steps, 6, or no slow step is made; got 48"),
        (("--periods", "x"), "--periods must be integers separated by commas, got x"),
        (("--momenta", "0.5,1"), "--momenta must be < 1, got 1"),
        (("--momenta", "0.5,0.5"), "--momenta must list one or more different"),
        (("--rates", "-1"), "--rates must be >= 0, got -1"),
        (("--rates", "much"), "--rates must be numbers separated by commas, got much"),
        (("--factors", "0"), "--factors and --learning-rate must be > 0, got 0"),
        (("--seeds", ""), "--seeds must list one or more different"),
    ],
)
def test_what_it_refuses(call, options, said):
    given = options if "--periods" in options else ("--periods", 3, *options)
    outcome = outer(call, *given)
    assert outcome.code == 2
    assert said in outcome.err
