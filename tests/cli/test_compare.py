"""`jaxslowmo compare`: its table, its picture, its files."""

import pytest

from cli.commands import QUICK, TINY, json_of, records
from jaxslowmo.cli._config import CompareConfig, read_config

SMALL = TINY.replace("train", "compare") + " --learning-rate 0.2"


def test_compare_ends_with_the_table_and_the_picture(call, text, tmp_path):
    out = tmp_path / "out"
    command = (
        SMALL, QUICK, "--algorithms all_reduce,local_sgd --seeds 0,1 --steps 6 --sync-every 3",
        "--eval-every 3 --data", text, "--out", out,
    )  # fmt: skip
    outcome = call(*command)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.rstrip().splitlines()
    assert lines[-1] == str(out / "compare.png")
    assert any("local_sgd" in line and "33.3 %" in line for line in lines[-9:])
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
    call(*command).is_refused("holds a comparison: give")
    call(TINY, "--data", text, "--out", out, "--resume").is_refused("algorithms")
    (out / "notes.txt").touch()
    (out / "diloco-seed9").mkdir()
    (out / "diloco-seed9" / "config.json").touch()
    again = "--algorithms all_reduce --seeds 0 --steps 2 --overwrite --data"
    assert call(SMALL, QUICK, again, text, "--out", out).code == 0
    assert {path.name for path in out.iterdir()} == {
        "config.json", "compare.json", "compare.png", "all_reduce-seed0", "notes.txt",
    }  # fmt: skip


@pytest.mark.filterwarnings("always:--algorithms")
def test_one_algorithm_with_several_settings(call, text, tmp_path):
    other = "sgp+overlap=1+mixing=self_weighted:0.7+nesterov=true+learning-rate=0.1"
    outcome = call(
        SMALL, QUICK, "--algorithms", f"sgp,{other}", "--steps 3 --eval-every 3 --mode host",
        "--graph ring --data", text, "--out", tmp_path,
    )  # fmt: skip
    said = "warning: --algorithms: nesterov has no effect with sgp.\n"
    assert (outcome.code, outcome.err) == (0, said)
    rows = json_of(tmp_path / "compare.json")["rows"]
    assert [row["algorithm"] for row in rows] == ["sgp", other]
    assert rows[0]["bytes_sent"] == rows[1]["bytes_sent"]
    assert rows[0]["validation_loss"] != rows[1]["validation_loss"]
    file = str(tmp_path / "config.json")
    again = read_config(CompareConfig, "jaxslowmo compare", ["--config", file])
    assert (again.algorithms, again.seeds, again.train.run.steps) == (f"sgp,{other}", "0", 3)
    settings = json_of(tmp_path / f"{other.replace(':', '-')}-seed0" / "config.json")
    assert (settings["algorithm"], settings["overlap"]) == ("sgp", 1)
    assert (settings["learning_rate"], settings["nesterov"]) == (0.1, True)
