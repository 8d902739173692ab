"""`--config`: values from YAML and JSON files, and from the config.json of a run."""

import json

import pytest
import yaml

from cli.commands import TINY, json_of

VALUES = {
    "preset": "tiny", "learning-rate": "3e-4", "eval_every": 7, "tied": True, "nesterov": False,
    "clip": 0, "rate-schedule": "constant", "data": None, "mesh": "replica=2,fsdp=2",
    "optimizer": "sgd",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """`asked["train"]`: the configuration that a command was called with."""
    found = {}
    for name in ("train", "compare", "tune_buckets", "inspect_config"):
        work = lambda config, *_, name=name: found.update({name: config}) or 0  # noqa: E731
        monkeypatch.setattr(f"jaxslowmo.cli._{name}.{name}", work)
    return found


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_values_replace_those_of_the_preset_and_options_replace_both(call, asked, tmp_path, kind):
    text = json.dumps(VALUES) if kind == "json" else yaml.safe_dump(VALUES)
    (tmp_path / f"run.{kind}").write_text(text)
    outcome = call(f"train --config run.{kind} --eval-every 9 --no-tied")
    assert (outcome.code, outcome.err) == (0, "")
    run = asked["train"]
    assert (run.steps, run.batch) == (48, 4)  # of the preset
    assert (run.log_every, run.weight_decay) == (10, 0.1)  # defaults
    assert (run.learning_rate, run.clip, run.optimizer) == (0.0003, 0, "sgd")
    assert run.schedule == "constant"
    assert (run.eval_every, run.tied, run.nesterov) == (9, False, False)
    assert (run.replicas, run.data) == (2, None)
    # Sizes of a file do not contradict --mesh, as those of a preset do not.
    (tmp_path / "sizes.yaml").write_text("replicas: 4\nbatch: 4")
    assert call("train --config sizes.yaml --mesh replica=2").code == 0
    assert asked["train"].replicas == 2
    (tmp_path / "lists.yaml").write_text("algorithms: [sgp, slowmo+nesterov=true]\nseeds: [3, 4]")
    assert call("compare --config lists.yaml").code == 0
    assert asked["compare"].algorithms == ("sgp", "slowmo+nesterov=true")
    assert asked["compare"].seeds == (3, 4)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.yaml", "stepz: 3", ["stepz"]),
        ("a.yaml", "optimizer: {rate: 3}", ["optimizer", "group"]),
        ("a.yaml", "config: b.yaml", ["config"]),
        ("a.yaml", "steps: many", ["--steps", "many"]),
        ("a.yaml", "steps: 1.5", ["--steps", "1.5"]),
        ("a.yaml", "steps: true", ["--steps", "True"]),
        ("a.yaml", "steps: 0", ["--steps", "0"]),
        ("a.yaml", "tied: 1", ["--tied", "1"]),
        ("a.yaml", "graph: rnig", ["--graph", "rnig"]),
        ("a.yaml", "learning_rate: .inf", ["--learning-rate", "inf"]),
        ("a.yaml", "data: ''", ["--data"]),
        ("a.yaml", "steps: [", ["YAML"]),
        ("a.yaml", "[steps, 3]", ["mapping"]),
        ("a.yaml", "", ["mapping"]),
        ("a.yaml", b"\xff\xfe\x00\xd8", ["text"]),
        ("a.json", '{"steps": 3', ["delimiter"]),
        ("a.json", '{"stepz": 3}', ["stepz"]),
        ("a.json", '{"optimizer": {"warmup": 3}}', ["optimizer", "group"]),
        ("a.yaml", "log-every: 3\nlog_every: 4", ["log_every", "twice"]),
        ("a.json", None, ["cannot read"]),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name_and_the_option(call, tmp_path, name, text, parts):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    call(f"train --config {name}").is_refused("--config", name, *parts)


def test_the_config_of_a_run_makes_the_next_one(call, asked, text, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    given = "--steps 3 --algorithm local_sgd --sync-every 2 --replicas 2 --log-every 1"
    one = call(TINY, given, "--data", text, "--overwrite --checkpoint-every 3 --out one")
    assert (one.code, one.err) == (0, "")
    two = call("train --config one/config.json --learning-rate 3e-4 --out two")
    assert (two.code, two.err) == (0, "")
    old, new = (json_of(tmp_path / name / "config.json") for name in ("one", "two"))
    assert new == old | {"learning_rate": 3e-4}
    # How a run is started is its own affair: otherwise --overwrite would delete by itself.
    assert not {"resume", "overwrite", "process_id"} & old.keys()
    assert "schedule_steps" not in old  # so the next run's schedule spans its own steps
    assert (old["sync_every"], old["rate_schedule"], old["schedule"]) == (
        2,
        "cosine",
        "one_f_one_b",
    )


def test_other_commands_take_of_a_file_what_they_have(call, asked, tmp_path):
    (tmp_path / "run.yaml").write_text("preset: tiny\nsteps: 300\nalgorithm: sgp\nreplicas: 2")
    for command in ("inspect config", "tune buckets", "compare"):
        outcome = call(command, "--config run.yaml")
        assert (outcome.code, outcome.err) == (0, ""), command
    assert asked["inspect_config"].train.algorithm == "sgp"
    assert asked["tune_buckets"].steps == 5  # steps of a measurement, not of a run
    assert asked["tune_buckets"].train.algorithm == "all_reduce"
    assert asked["compare"].train.steps == 300
