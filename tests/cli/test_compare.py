"""`jaxslowmo compare`: its table, its sentence, its files; and how numbers are written."""

import io

import pytest
from rich.console import Console

from cli.commands import TINY, json_of, records
from jaxslowmo.cli._compare import compare_rows, draw_comparison, meaning
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli._output import (
    Reporter,
    format_bytes,
    format_count,
    format_loss,
    json_line,
)
from jaxslowmo.cli.config._commands import CompareConfig
from jaxslowmo.cli.config._training import train_config

SMALL = TINY.replace("train", "compare") + " --learning-rate 0.2"


def test_compare_ends_with_the_table_and_the_picture(call, text, tmp_path):
    out = tmp_path / "out"
    command = (
        SMALL, "--algorithms all_reduce,local_sgd --seeds 0,1 --steps 6 --sync-every 3",
        "--eval-every 3 --data", text, "--out", out,
    )  # fmt: skip
    outcome = call(*command)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.rstrip().splitlines()
    assert lines[-1] == str(out / "compare.png")
    assert any("local_sgd" in line and "33.3 %" in line for line in lines[-9:])
    assert lines[-2].startswith("With 1/3 of the bytes local_sgd ends 0.0")
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    rows = json_of(out / "compare.json")["rows"]
    assert [row["algorithm"] for row in rows] == ["all_reduce", "local_sgd"]
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1 / 3])
    names = [f"{name}-seed{seed}" for name in ("all_reduce", "local_sgd") for seed in (0, 1)]
    for name in names:
        files = {p.name for p in (out / name).iterdir()}
        assert files == {"config.json", "metrics.jsonl", "summary.json"}
    starts = [records(out / name)[0]["validation_loss"] for name in names]
    assert starts[0] == starts[2] != starts[1] == starts[3]  # the same start for a seed

    # What lies there is not overwritten, and no run goes on in it, unless it is asked for.
    call(*command).is_refused("holds a comparison of all_reduce, local_sgd (finished): give")
    for resume in ("", "--resume"):
        call(TINY, "--data", text, "--out", out, resume).is_refused("holds a comparison of")
    (out / "notes.txt").touch()
    (out / "diloco-seed9").mkdir()
    (out / "diloco-seed9" / "config.json").touch()
    again = "--algorithms all_reduce --seeds 0 --steps 2 --overwrite --data"
    assert call(SMALL, again, text, "--out", out).code == 0
    assert {path.name for path in out.iterdir()} == {
        "config.json", "compare.json", "compare.png", "all_reduce-seed0", "notes.txt",
    }  # fmt: skip


def test_one_algorithm_with_several_settings(call, text, tmp_path):
    other = "sgp+overlap=1+mixing=self_weighted:0.7+learning-rate=0.1"
    outcome = call(
        SMALL, "--algorithms", f"sgp,{other}", "--steps 3 --eval-every 3 --mode host",
        "--graph ring --data", text, "--out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    rows = json_of(tmp_path / "compare.json")["rows"]
    assert [row["algorithm"] for row in rows] == ["sgp", other]
    assert rows[0]["bytes_sent"] == rows[1]["bytes_sent"]
    assert rows[0]["validation_loss"] != rows[1]["validation_loss"]
    settings = json_of(tmp_path / f"{other.replace(':', '-')}-seed0" / "config.json")
    assert (settings["algorithm"], settings["overlap"]) == ("sgp", 1)
    assert settings["learning_rate"] == 0.1


def test_algorithms_of_a_comparison_bring_settings():
    name = "slowmo+slow_momentum=0.1+nesterov=true+exact_average=False"
    config = CompareConfig(train_config({}), algorithms=("all_reduce", name), seeds=(0,))
    chosen = config.run(name, 0)
    assert (chosen.algorithm, chosen.slow_momentum) == ("slowmo", 0.1)
    assert (chosen.nesterov, chosen.exact_average) == (True, False)
    assert not config.run("all_reduce", 0).nesterov


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


def test_rows_average_over_the_seeds_that_finished(tmp_path):
    def run(algorithm, seed, loss, sent, status="finished"):
        return {
            "algorithm": algorithm, "seed": seed, "status": status, "validation_loss": loss,
            "bytes_sent": sent, "tokens_per_second": 10.0,
        }  # fmt: skip

    runs = [run("a", 0, 2.0, 100), run("a", 1, 3.0, 100), run("b", 0, 2.5, 25)]
    rows = compare_rows([*runs, run("b", 1, None, 5, "diverged")])
    assert rows[0] == {
        "algorithm": "a", "seeds": [0, 1], "validation_loss": 2.5, "spread": 1.0,
        "bytes_sent": 100.0, "ratio": 1.0, "tokens_per_second": 10.0, "diverged": 0,
    }  # fmt: skip
    assert (rows[1]["validation_loss"], rows[1]["spread"]) == (2.5, None)
    assert (rows[1]["ratio"], rows[1]["diverged"]) == (0.25, 1)
    assert compare_rows([]) == []
    # Of runs that all diverged there is a picture, too.
    draw_comparison({"slowmo": []}, tmp_path / "empty.png", subtitle="")
    assert (tmp_path / "empty.png").exists()


def test_numbers_are_short_and_json_has_null_for_what_it_lacks():
    assert [format_bytes(n) for n in (0, 999, 1000, 56_463_360, 999_700_000)] == [
        "0 B", "999 B", "1.00 kB", "56.5 MB", "1.00 GB",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 470_528, 1_073_536)] == ["12", "471k", "1.07M"]
    assert [format_loss(x) for x in (2.4164, None, float("nan"))] == ["2.416", "-", "-"]
    line = json_line({"a": [1.0, float("inf")], "b": {"c": float("nan")}})
    assert line == '{"a": [1.0, null], "b": {"c": null}}\n'
    assert str(CommandError("two\n  lines")) == "two lines"


def test_an_evaluation_of_some_steps_ago_is_told_with_its_step():
    shown = io.StringIO()
    with Reporter(Console(file=shown, width=200), "sgd", 4) as reporter:
        for record in (
            {"step": 0, "validation_loss": 5.0},
            {"step": 1, "loss": 4.0},
            {"step": 2, "loss": 3.0, "validation_loss": 2.5},
            {"step": 4, "loss": 2.0, "tokens_per_second": None},
        ):
            reporter.show({"bytes_sent": 0, **record})
    assert shown.getvalue().splitlines() == [
        "sgd: 0/4  validation 5.000  sent 0 B",
        "sgd: 1/4  loss 4.000  validation 5.000 (step 0)  sent 0 B",
        "sgd: 2/4  loss 3.000  validation 2.500  sent 0 B",
        "sgd: 4/4  loss 2.000  validation 2.500 (step 2)  sent 0 B",
    ]
