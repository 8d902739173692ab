"""Options: which there are, what they become, and files whose values keep their types."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from cli.commands import QUICK, TINY, json_of
from jaxslowmo.cli import _config, _setup
from jaxslowmo.cli._config import (
    PRESETS,
    CompareConfig,
    RunConfig,
    TrainConfig,
    flatten_options,
    option_types,
    read_config,
    replace_options,
    to_file,
    unused_options,
)
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.models import GPT_PRESETS
from jaxslowmo.topology import GRAPHS

OPTIONS = option_types(TrainConfig)


def asked(*words: object) -> TrainConfig:
    return read_config(TrainConfig, "jaxslowmo train", [*map(str, words)])


def test_reading_loads_no_jax_help_shows_what_most_need_and_a_file_takes_all():
    code = (
        "import sys\nfrom jaxslowmo.cli import main\n"
        "from jaxslowmo.cli._config import TrainConfig, read_config\n"
        "read_config(TrainConfig, 'train', ['--steps', '3'])\n"
        "print('jax' in sys.modules, flush=True)\nmain(['train', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = done.stdout
    assert shown.startswith("False\n")
    visible = set(re.findall(r"^│ --([a-z-]+)", shown, re.MULTILINE))
    assert 40 < len(visible) <= 45
    names = {name.replace("_", "-") for name in OPTIONS}
    assert visible < names
    sections = [x for x in dataclasses.fields(TrainConfig) if x.name != "dry_run"]
    # Names of different sections differ, so that a file needs no sections.
    assert len(OPTIONS) == 1 + sum(len(dataclasses.fields(x.default)) for x in sections)


def test_options_come_before_a_file_and_that_before_a_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: demo\nlearning-rate: 3e-4\neval_every: 7\ntied: true\ndata: null\n")
    config = asked("--config", file, "--eval-every", 9)
    assert config.model == dataclasses.replace(config.model, preset="demo", tied=True)
    found = config.run.steps, config.run.eval_every, config.optimizer.learning_rate
    assert found == (192, 9, 3e-4)
    assert config.data == _config.DataConfig(batch=4)
    assert asked("--config", file, "--preset", "tiny").run.steps == 48
    assert set(PRESETS) == set(GPT_PRESETS) == {*get_args(OPTIONS["preset"][1])}
    other = read_config(
        CompareConfig, "jaxslowmo compare", ["--config", str(file), "--seeds", "3,4"]
    )
    assert (other.seeds, other.train.run.steps, other.train.model.tied) == ("3,4", 192, True)


def test_another_preset_sets_what_a_run_had_by_default_and_nothing_else(tmp_path):
    preset, other = "124m", "demo"

    def values(*words):
        config = flatten_options(asked(*words))
        return {k: v for k, v in config.items() if k not in ("preset", "config")}

    fresh, run = values("--preset", other), asked("--preset", preset)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_file(run)))
    assert values("--config", file) == values("--preset", preset)
    assert values("--config", file, "--preset", other) == fresh
    # What the run had set stays, and what the words set comes before it.
    own = {name: 3 * flatten_options(run)[name] for name in ("steps", "eval_every")}
    file.write_text(json.dumps(to_file(replace_options(run, own))))
    changed = values("--config", file, "--preset", other, "--steps", 5000)
    assert changed == fresh | own | {"steps": 5000}


ALGORITHMS = get_args(OPTIONS["algorithm"][1])
OTHER_VALUES = {
    "sync_every": 6, "slow_every": 24, "graph": "ring", "overlap": 1, "slow_momentum": 0.25,
    "slow_learning_rate": 0.5, "outer_learning_rate": 0.5, "fragments": 2, "delay": 1,
    "codec": "bfloat16", "outer_momentum": 0.5, "bucket_mib": 3.0, "peers_per_step": 1,
    "mixing": "self_weighted:0.7", "nesterov": True, "shard_state": False, "exact_average": False,
    "merge": 0.5, "inner_state": "reset",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_an_algorithm_does_not_read_has_no_effect(monkeypatch, algorithm):
    """The arguments of the library differ if and only if the option is not called unused."""
    calls: list[Any] = []

    def record(name: str) -> None:
        def call(*args: Any, **options: Any) -> str:
            calls.append((name, args, sorted(options.items())))
            return name

        monkeypatch.setattr(_setup.js, name, call)

    for name in ("local_sgd", "sgp", "slowmo", "diloco", "all_reduce_gradients", "make_train_step"):
        record(name)
    monkeypatch.setattr(_setup, "_optimizer", lambda config, rate: None)
    monkeypatch.setattr(
        _setup, "_outer_optimizer", lambda own: (own.outer_learning_rate, own.outer_momentum)
    )
    monkeypatch.setattr(_setup, "learning_rate_schedule", lambda config: None)

    def arguments(values):
        calls.clear()
        config = replace_options(TrainConfig(), {"algorithm": algorithm} | values)
        _setup.make_step(config, None, None)
        return re.sub(r" at 0x[0-9a-f]+", "", repr(calls)), unused_options(config)

    start, _ = arguments({})
    for name, value in OTHER_VALUES.items():
        changed, unused = arguments({name: value})
        assert (changed == start) == (name in unused), name
    fields = {field.name for field in dataclasses.fields(_config.AlgorithmConfig)}
    assert {*OTHER_VALUES} == fields - {"algorithm", "check_parameters"}  # this one is refused


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        ("train --algorithm all_reduce --codec int8", "--codec", "with all_reduce"),
        ("train --mesh replica=2 --replicas 3", "--replicas", "replica=2"),
        ("compare --algorithms sgp,all_reduce --sync-every 3", "--sync-every", "sgp, all_reduce"),
        ("sample x --temperature 0 --top_k 3 --prompt seed", "--top-k", "--temperature 0"),
    ],
)
def test_an_option_without_effect_is_a_warning(call, monkeypatch, tmp_path, words, name, reason):
    def ends(*args: object) -> int:
        return 0

    monkeypatch.setattr("jaxslowmo.cli._run.train", ends)
    monkeypatch.setattr("jaxslowmo.cli._compare.compare", ends)
    monkeypatch.setattr("jaxslowmo.cli._sample.sample", ends)
    outcome = call(words)
    assert (outcome.code, outcome.err.count("\n")) == (0, 1), outcome
    assert outcome.err.startswith(f"warning: {name} has no effect ")
    assert reason in outcome.err


def test_what_follows_from_other_options():
    def warmup(*words):
        config = asked("--preset", "demo", *words)
        return config.warmup_steps, config.schedule_length

    assert warmup() == (16, 192)
    assert warmup("--steps", 77) == (7, 77)
    mesh = asked("--mesh", "stage=2,fsdp=1, replica = 3,device=2", "--batch", 8).mesh
    assert (mesh.num_replicas, mesh.devices_per_replica, mesh.batch_shards) == (3, 4, 2)
    assert asked("--mesh", "fsdp=2", "--replicas", 5).mesh.num_replicas == 5
    for batch, asked_for, count in ((16, None, 8), (8, None, 4), (6, None, 3), (16, 2, 2)):
        values = {"mesh": "stage=2,fsdp=2", "batch": batch, "microbatches": asked_for}
        assert replace_options(TrainConfig(), values).num_microbatches == count


def read_value(folder: Path, name: str, text: str) -> Any:
    """Return the repr of what a file with this option becomes; None if it is refused."""
    path = folder / "a.yaml"
    path.write_text(f"{name}: {text}\n")
    try:
        return repr(_config.read_file(TrainConfig, path).get(name))
    except CommandError:
        return None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("steps", {"3": "3", "0": None, "3.0": None, "true": None, "1e3": None, "~": "None"}),
        ("clip", {"3": "3.0", "1e-3": "0.001", ".5": None, "-1": None, "true": None, "x": None}),
        ("export", {"true": "True", "False": "False", "yes": None, "1": None}),
        ("island", {"a": "'a'", "'3'": "'3'", "3": None, "''": None}),
    ],
)
def test_values_of_a_file_keep_their_types_or_are_refused(tmp_path, name, found):
    assert {text: read_value(tmp_path, name, text) for text in found} == found


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yaml", "stepz: 3", "stepz is no option; did you mean steps?"),
        ("a.yaml", "steps: 3\nsteps: 4", "twice"),
        ("a.json", '{"learning_rate": Infinity}', "inf"),
        ("a.json", None, "cannot read"),
    ],
)
def test_a_wrong_file_is_one_line(call, tmp_path, name, text, part):
    if text is not None:
        (tmp_path / name).write_text(text)
    call("train --preset tiny --config", name).is_refused(part)


# Calls of which each is wrong in one way, and what its line must hold.
REFUSED: dict[str, tuple[str, ...]] = {
    "trian": ("trian", "did you mean train?"),
    "train --sync-every 2 --lr 3": ("--lr", "did you mean --learning-rate?"),
    "train --data a b": ("--data takes one value", "b is one too many"),
    "train --steps 0": ("--steps", "0"),
    "train --algorithm diloco --fragments 5": ("--slow-every", "5 fragments"),
    "train --algorithm sgp --graph rnig": ("rnig", *GRAPHS),
    "train --replicas 9 --execution devices": ("9 devices", "8"),
    "train --data /no/such/path": ("--data", "/no/such/path"),
    "train --resume --overwrite --out x": ("--overwrite", "resume"),
    "train --islands run --island a --algorithm local_sgd": ("--algorithm", "local_sgd"),
    "launch --processes 2 train --out x": ("jaxslowmo launch --processes 2 -- train --out x",),
    "sample /no/such/run": ("/no/such/run",),
    "islands status ftp://run": ("ftp://run",),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_one_line_and_leaves_nothing(call, text, tmp_path, words):
    (tmp_path / "text").symlink_to(text)
    data = "--data text" if words.startswith("train") and "--data" not in words else ""
    call(words, data).is_refused(*REFUSED[words])
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["text"]


def test_the_config_of_a_run_makes_the_next_one(call, text, tmp_path):
    given_ = "--steps 3 --algorithm local_sgd --sync-every 2 --replicas 2 --log-every 1"
    one = call(TINY, QUICK, given_, "--data", text, "--overwrite --checkpoint-every 3 --out one")
    assert (one.code, one.err) == (0, "")
    two = call("train --config one/config.json --learning-rate 3e-4 --out two")
    assert (two.code, two.err) == (0, "")
    old, new = (json_of(tmp_path / name / "config.json") for name in ("one", "two"))
    assert new == old | {"learning_rate": 3e-4}
    # How a run is started is its own affair: otherwise --overwrite would delete by itself.
    assert not {"resume", "overwrite", "process_id", "out", "config"} & old.keys()
    assert old["schedule_steps"] is None  # so the next run's schedule spans its own steps
    assert to_file(replace_options(TrainConfig(), old)) == old
    assert old.keys() > {x.name for x in dataclasses.fields(RunConfig)} - {
        "out", "config", "overwrite",
    }  # fmt: skip
