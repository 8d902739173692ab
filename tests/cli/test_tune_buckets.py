"""`jaxslowmo tune buckets`: what it measures, shows and writes."""

import json

import pytest

from jaxslowmo.cli._tune_buckets import best_limit, make_rows

LAYOUTS = {0: ((("b",), 4), (("a",), 6)), 8: ((("b", "a"), 10),), 20: ((("b", "a"), 10),)}


def test_it_measures_and_writes(call, tmp_path):
    outcome = call(
        "tune", "buckets", "--preset", "demo", "--batch", 2, "--replicas", 2, "--optimizer", "sgd",
        "--limits", "5MiB,2KiB,9MiB", "--first", "1KiB", "--rounds", 2, "--steps", 1,
        "--order", "reverse", "--out", tmp_path / "out",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 replicas on 2 of 8 CPU devices" in outcome.out
    for text in ("per leaf", "2 KiB", "5 MiB", "as 5 MiB", "(best)", "Best: js.all_reduce"):
        assert text in outcome.out
    assert 'js.make_train_step(..., order="reverse")' in outcome.out
    assert (tmp_path / "out" / "tune.png").stat().st_size > 10_000

    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    rows = {row["limit"]: row for row in found["rows"]}
    assert list(rows) == [0, 2 * 2**10, 5 * 2**20, 9 * 2**20]
    leaves, small, large, larger = rows.values()
    # The same gradients in fewer buckets; the first bucket is smaller than the others.
    assert len(leaves["bucket_sizes"]) > len(small["bucket_sizes"]) > len(large["bucket_sizes"])
    assert len({sum(row["bucket_sizes"]) for row in rows.values()}) == 1
    assert len(large["bucket_sizes"]) == 2
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
        return best_limit(make_rows(layouts, dict(zip(layouts, seconds, strict=True))))

    # 8 is fastest by a hair and 20 beats it in one round of three.
    assert best([3.0, 3.0, 3.0], [1.0, 1.0, 1.2], [1.01, 1.01, 1.1]) == 20
    # 20 is never as fast.
    assert best([3.0, 3.0, 3.0], [1.0, 1.0, 1.2], [1.01, 1.01, 1.3]) == 8
    assert best([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]) == 0


def test_unfinished_rounds_do_not_count_and_equal_layouts_share_a_row():
    rows = make_rows(LAYOUTS, {0: [4.0, 8.0, 1.0], 8: [2.0, 2.0]})
    assert [(row.limit, row.same_as, row.seconds) for row in rows] == [
        (0, None, (4.0, 8.0)),
        (8, None, (2.0, 2.0)),
        (20, 8, (2.0, 2.0)),
    ]
    assert rows[1].ratio == pytest.approx((2 / 4 + 2 / 8) / 2)
    assert best_limit(rows) == 8  # not 20, which was not measured itself
