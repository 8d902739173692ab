"""`jaxslowmo tune buckets` and `tune outer`: what they measure, show, write and advise."""

import dataclasses
import signal

import numpy as np
import pytest

from cli.commands import json_of
from jaxslowmo.cli import _tune_buckets, _tune_outer
from jaxslowmo.cli._tune_buckets import best_limit, draw_limits
from jaxslowmo.cli._tune_outer import advice, make_rows, rows_table
from jaxslowmo.cli.config._commands import TuneOuterConfig
from jaxslowmo.cli.config._training import train_config


def test_buckets_are_measured_and_written(call, tmp_path):
    outcome = call(
        "tune buckets --preset tiny --batch 2 --replicas 2 --optimizer sgd --rounds 2 --steps 1",
        "--limits 20KiB,2KiB,9MiB,5MiB --first 1KiB --order reverse --out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 replicas on 2 of 8 CPU devices" in outcome.out
    for text in ("per leaf", "2 KiB", "5 MiB", "as 5 MiB", "(best)", "Best: js.all_reduce"):
        assert text in outcome.out
    assert ', order="reverse")' in outcome.out
    assert (tmp_path / "tune.png").stat().st_size > 10_000
    found = json_of(tmp_path / "tune.json")
    rows = {row["limit"]: row for row in found["rows"]}
    assert list(rows) == [0, 2 * 2**10, 20 * 2**10, 5 * 2**20, 9 * 2**20]
    leaves, small, middle, large, larger = rows.values()
    # The same gradients in fewer buckets; the first bucket is smaller than the others.
    counts = [len(row["bucket_sizes"]) for row in (leaves, small, middle, large)]
    assert sorted(set(counts), reverse=True) == counts
    assert counts[-1] == 2
    assert len({sum(row["bucket_sizes"]) for row in rows.values()}) == 1
    assert larger["same_as"] == large["limit"]
    assert larger["seconds"] == large["seconds"]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
    assert leaves["ratio"] == 1
    best = found["best"]
    assert best["bucket_bytes"] in rows
    assert best["first_bucket_bytes"] == min(2**10, best["bucket_bytes"])


def test_ties_go_to_the_larger_bucket():
    def best(*seconds):
        layouts = {limit: ((("a",), limit),) for limit in (0, 8, 20)}
        return best_limit(
            _tune_buckets.make_rows(layouts, dict(zip(layouts, seconds, strict=True)))
        )

    # 8 is fastest by a hair and 20 beats it in one round of three.
    assert best([3.0, 3.0, 3.0], [1.0, 1.0, 1.2], [1.01, 1.01, 1.1]) == 20
    # 20 is never as fast.
    assert best([3.0, 3.0, 3.0], [1.0, 1.0, 1.2], [1.01, 1.01, 1.3]) == 8
    assert best([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]) == 0


def test_unfinished_rounds_do_not_count_and_equal_layouts_share_a_row(tmp_path):
    layouts = {0: ((("b",), 4), (("a",), 6)), 8: ((("b", "a"), 10),), 20: ((("b", "a"), 10),)}
    rows = _tune_buckets.make_rows(layouts, {0: [4.0, 8.0, 1.0], 8: [2.0, 2.0]})
    assert [(row["limit"], row["same_as"], row["seconds"]) for row in rows] == [
        (0, None, [4.0, 8.0]),
        (8, None, [2.0, 2.0]),
        (20, 8, [2.0, 2.0]),
    ]
    assert rows[1]["ratio"] == pytest.approx((2 / 4 + 2 / 8) / 2)
    assert best_limit(rows) == 8  # not 20, which was not measured itself
    one = _tune_buckets.make_rows({0: layouts[0]}, {0: [0.5]})
    draw_limits(one, 0, tmp_path / "one.png", subtitle="one")
    assert (tmp_path / "one.png").stat().st_size > 10_000


SMALL = "tune outer --preset tiny --replicas 2 --batch 2 --steps 6 --eval-batches 1"


def test_outer_trains_and_writes(call, tmp_path):
    outcome = call(
        SMALL, "--sync-every 2 --periods 4 --momenta 0,0.4 --rates 0.7,1 --factors 1",
        "--seeds 0,1 --eval-every 4 --out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "8 runs of 6 steps for each of 1 periods" in outcome.out
    assert "2 virtual replicas" in outcome.out
    for text in ("Every 4: ", "plain average"):
        assert text in outcome.out
    assert (tmp_path / "tune.png").stat().st_size > 10_000
    found = json_of(tmp_path / "tune.json")
    assert found["steps_done"] == 6
    rows = found["rows"]
    # Plain averages are momentum 0 at a rate of 1, which is not tried twice.
    assert len(rows) == 4
    means = [row["mean"] for row in rows]
    assert means == sorted(means)
    assert all(len(set(row["losses"])) == 2 for row in rows)


def test_a_run_of_it_has_the_loss_of_the_same_run_by_train(call, tmp_path):
    """Warm-up, clipping and cosine are those of `train`."""
    outcome = call(
        SMALL, "--warmup 2 --algorithm diloco --periods 3 --momenta 0.5 --rates 0.6 --seeds 5",
        "--factors 0.25 --learning-rate 0.004 --out", tmp_path / "tuned",
    )  # fmt: skip
    assert outcome.code == 0
    call(
        SMALL.replace("tune outer", "train"), "--warmup 2 --learning-rate 0.001 --seed 5",
        "--algorithm diloco --slow-every 3 --outer-momentum 0.5 --outer-learning-rate 0.6",
        "--execution virtual --out", tmp_path / "trained",
    )  # fmt: skip
    rows = json_of(tmp_path / "tuned" / "tune.json")["rows"]
    (loss,) = next(row["losses"] for row in rows if row["momentum"] == 0.5)
    summary = json_of(tmp_path / "trained" / "summary.json")
    np.testing.assert_allclose(loss, summary["validation_loss"], rtol=1e-5)


@pytest.mark.parametrize(("stopped", "kept", "steps"), [(4, [2], 6), (2, [2], 3)])
def test_a_period_that_was_stopped_early_is_shown_alone_or_not_at_all(
    call, tmp_path, monkeypatch, stopped, kept, steps
):
    def train_all(config, text):
        losses = np.linspace(2, 3, len(config.settings()["rate"]))[:, None]
        for period in config.periods:
            if period == stopped:
                signal.raise_signal(signal.SIGINT)
            yield period, 3 if period == stopped else 6, losses

    monkeypatch.setattr(_tune_outer, "train_all", train_all)
    outcome = call(SMALL, "--sync-every 2 --periods 2,4 --seeds 0 --out", tmp_path)
    assert outcome.code == 130
    assert f"these are losses after {steps} of 6 steps" in outcome.out
    found = json_of(tmp_path / "tune.json")
    assert found["steps_done"] == steps
    assert sorted({row["period"] for row in found["rows"]}) == kept


def test_advice_says_whether_a_setting_beats_plain_averages():
    run = train_config({"algorithm": "slowmo"})
    config = TuneOuterConfig(run, momenta=(0.2, 0.5, 0.8), factors=(0.5, 1.0))

    def rows(*losses):
        """Return rows with these losses of one setting, and plain averages with 2."""
        settings = config.settings()
        tried = zip(settings["factor"], settings["momentum"], strict=True)
        table = [losses if x == (1.0, 0.5) else [2.0 + (x[1] > 0)] * 3 for x in tried]
        return sorted(make_rows(config, 48, np.array(table)), key=lambda row: row["mean"])

    (better,) = advice(config, rows(1.5, 1.6, 1.7))
    assert "js.slowmo(..., momentum=0.5, slow_learning_rate=1)" in better
    assert "1.600, plain averages 2.000; it is smaller with 3 of 3 seeds" in better
    assert "At the end of what was tried: --factors 1; try more" in better
    for losses in [(1.0, 2.1, 2.1), (2.1, 2.2, 2.3), (1.0, 1.0, float("nan"))]:
        said = advice(config, rows(*losses))
        assert said == ["Every 48: no setting beats plain averages, 2.000."]
    # The table keeps plain averages however long it is.
    config = dataclasses.replace(config, momenta=tuple(n / 100 for n in range(1, 40)))
    losses = np.where(np.array(config.settings()["momentum"]) > 0, 1.0, 99.0)[:, None]
    many = sorted(make_rows(config, 48, losses), key=lambda row: row["mean"])
    assert rows_table(many).row_count == 22
