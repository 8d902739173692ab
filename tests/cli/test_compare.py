"""`jaxslowmo compare`: the table, the picture, and the results on disk."""

import json

import pytest

from jaxslowmo.cli._compare import meaning


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
    assert lines[-2].startswith("With 1/3 of the bytes local_sgd ends 0.0")
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


def test_each_algorithm_may_have_its_own_learning_rate_also_where_nothing_is_sent(
    call, text, tmp_path
):
    out = tmp_path / "out"
    call(
        "compare", "--preset", "tiny", "--algorithms", "local_sgd,local_sgd+learning-rate=0.002",
        "--steps", 2, "--batch", 2, "--eval-every", 2, "--data", text, "--out", out,
    )  # fmt: skip
    folders = ("local_sgd-seed0", "local_sgd+learning-rate=0.002-seed0")
    configs = [json.loads((out / name / "config.json").read_text()) for name in folders]
    assert [config["optimizer"]["learning_rate"] for config in configs] == [0.01, 0.002]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"all_reduce": (2, 1), "local_sgd": (3, 0.02), "slowmo": (2.4, 0.0201)},
         "With 1/50 of the bytes slowmo ends 0.400 above all_reduce; it closes 60 % of the gap "
         "that plain averages (local_sgd) leave with as many bytes."),
        ({"all_reduce": (2, 1), "local_sgd": (1.9, 0.08), "slowmo": (1.8, 0.08)},
         "With 1/12 of the bytes slowmo ends 0.200 below all_reduce."),
        ({"all_reduce": (2, 1), "local_sgd": (2.1, 0.08), "slowmo": (2.2, 0.08)},
         "With 1/12 of the bytes local_sgd ends 0.100 above all_reduce."),
        ({"all_reduce": (2, 1), "diloco": (2.2, 0.02), "local_sgd": (2.5, 0.08)},
         "With 1/50 of the bytes diloco ends 0.200 above all_reduce."),
        ({"all_reduce": (2, 1), "sgp": (2.2, 0.67)}, None),
        ({"all_reduce": (None, None), "slowmo": (2.2, 0.02)}, None),
        ({"all_reduce": (2, 1)}, None),
    ],
)  # fmt: skip
def test_one_sentence_says_what_the_table_means(losses, said):
    names = ("validation_loss", "ratio")
    rows = [{"algorithm": k, **dict(zip(names, v, strict=True))} for k, v in losses.items()]
    assert meaning(rows) == ([] if said is None else [said])
