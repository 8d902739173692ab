"""`jaxslowmo compare`: the table, the picture, and the results on disk."""

import json

import pytest


def test_compare_ends_with_the_table_and_the_picture(call, text, tmp_path):
    out = tmp_path / "out"
    outcome = call(
        "compare", "--preset", "demo", "--algorithms", "all_reduce,local_sgd", "--seeds", "0,1",
        "--steps", 6, "--batch", 2, "--sync-every", 3, "--eval-every", 3, "--eval-batches", 1,
        "--data", text, "--out", out,
        "--optimizer", "sgd", "--clip", 0, "--learning-rate", 0.2,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.rstrip().splitlines()
    assert lines[-1] == str(out / "compare.png")
    assert any("local_sgd" in line and "33.3 %" in line for line in lines[-9:])
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")

    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["all_reduce", "local_sgd"]
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1 / 3])
    assert all(row["spread"] >= 0 for row in rows)
    for name in ("all_reduce-seed0", "all_reduce-seed1", "local_sgd-seed0", "local_sgd-seed1"):
        assert {p.name for p in (out / name).iterdir()} == {
            "config.json", "metrics.jsonl", "summary.json",
        }  # fmt: skip
    first, second = (
        json.loads((out / f"{name}-seed0" / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("all_reduce", "local_sgd")
    )
    assert first["validation_loss"] == second["validation_loss"]  # the same start


def test_one_algorithm_with_several_settings(call, text, tmp_path):
    out = tmp_path / "out"
    outcome = call(
        "compare", "--preset", "demo", "--algorithms", "sgp,sgp+overlap=1+mixing=self_weighted:0.7",
        "--steps", 3, "--batch", 2, "--eval-every", 3, "--eval-batches", 1, "--mode", "host",
        "--graph", "ring", "--data", text, "--out", out,
        "--optimizer", "sgd", "--clip", 0, "--learning-rate", 0.2,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["sgp", "sgp+overlap=1+mixing=self_weighted:0.7"]
    assert rows[0]["bytes_sent"] == rows[1]["bytes_sent"]
    assert rows[0]["validation_loss"] != rows[1]["validation_loss"]
    folder = out / "sgp+overlap=1+mixing=self_weighted-0.7-seed0"
    settings = json.loads((folder / "config.json").read_text())["algorithm"]
    assert (settings["algorithm"], settings["overlap"]) == ("sgp", 1)
