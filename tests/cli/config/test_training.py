"""Configurations of a run: presets, defaults, and what cannot be trained."""

import dataclasses

import pytest

from jaxslowmo.cli.config._training import (
    PRESET_DEFAULTS,
    TrainConfig,
    train_config,
    train_options,
    with_values,
)
from jaxslowmo.models import GPT_PRESETS


def test_every_preset_has_defaults_that_are_valid():
    assert set(PRESET_DEFAULTS) == set(GPT_PRESETS)
    for preset in PRESET_DEFAULTS:
        assert train_config({"preset": preset}).preset == preset
    named = {name for values in PRESET_DEFAULTS.values() for name in values}
    assert named <= train_options().keys()


def test_what_is_given_goes_before_the_preset_and_that_before_the_defaults():
    config = train_config({"preset": "demo", "steps": 77, "batch": None})
    assert config.steps == 77
    assert config.batch == PRESET_DEFAULTS["demo"]["batch"]
    assert config.replicas == TrainConfig.replicas
    assert config.optimizer.warmup == 7  # a tenth, since the preset's is for its own steps
    assert train_config({"steps": 1}).optimizer.warmup == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_warm_up_follows_the_schedule_and_what_was_not_given_is_known():
    config = train_config({"steps": 40, "schedule_steps": 100})
    assert (config.schedule_length, config.optimizer.warmup) == (100, 10)
    assert config.not_given == ("warmup",)
    assert train_config({"steps": 40}).schedule_length == 40
    assert train_config({}).not_given == ("steps", "warmup", "schedule_steps")
    with pytest.raises(ValueError, match="--warmup must be < --schedule-steps, got 20 and 10"):
        train_config({"steps": 40, "schedule_steps": 10, "warmup": 20})
    with pytest.raises(ValueError, match="--warmup must be < --steps, got 20 and 10"):
        train_config({"steps": 10, "warmup": 20})


def test_values_of_every_part_can_be_replaced():
    config = train_config({"seed": 3})
    changed = with_values(config, {"steps": 7, "warmup": 1, "graph": "ring", "resume": True})
    found = (changed.steps, changed.optimizer.warmup, changed.algorithm.graph)
    assert (*found, changed.checkpoint.resume, changed.seed) == (7, 1, "ring", True, 3)
    with pytest.raises(ValueError, match="--steps must be >= 1, got 0"):
        with_values(config, {"steps": 0})


@pytest.mark.parametrize("mib", [-1, float("nan"), float("inf")])
def test_a_bucket_size_that_is_none_is_refused(mib):
    with pytest.raises(ValueError, match="--bucket-mib must be "):
        train_config({"bucket_mib": mib})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-processes", 2], "--coordinator, --process-id must be given too"),
        (
            ["--coordinator", "h", "--num-processes", 2, "--process-id", 0],
            "--coordinator must be HOST:PORT, got h",
        ),
        *(
            (
                ["--coordinator", coordinator, "--num-processes", 2, "--process-id", 0],
                f"the port of --coordinator must be 1 to 65535, got {coordinator[2:] or 'nothing'}",
            )
            for coordinator in ("h:0", "h:99999", "h:abc", "h:", "h:²", "h:-1")
        ),
        (
            ["--coordinator", "::1:80", "--num-processes", 2, "--process-id", 0],
            "--coordinator must be HOST:PORT, an IPv6 address in brackets, got ::1:80",
        ),
        (
            ["--coordinator", "[h]:80", "--num-processes", 2, "--process-id", 0],
            "--coordinator must be a host's name or address, got [h]",
        ),
        (
            ["--coordinator-bind", "0.0.0.0:80"],
            "--coordinator-bind must be a host's name or address, got 0.0.0.0:80",
        ),
        (
            ["--coordinator", "h:1", "--num-processes", 2, "--process-id", 2],
            "--process-id must be < --num-processes, got 2 and 2",
        ),
        (["--cluster", "pbs"], "--cluster must be one of auto, none, slurm"),
        (["--heartbeat-timeout", 1], "--heartbeat-timeout must be >= 2, got 1"),
        (["--on-nan", "ignore"], "--on-nan must be one of stop, rollback, got ignore"),
    ],
)
def test_what_cannot_be_trained(call, argv, words):
    outcome = call("train", *argv)
    assert outcome.code == 2
    assert words in outcome.err
