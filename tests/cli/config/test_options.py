"""Options that are made from fields: no command lacks one, and none says it twice."""

from typing import Any

import pytest
import typer

from jaxslowmo.cli._app import app
from jaxslowmo.cli._errors import as_flag
from jaxslowmo.cli.config._cluster import ClusterConfig
from jaxslowmo.cli.config._commands import CompareConfig, TuneBucketsConfig
from jaxslowmo.cli.config._fields import flag_of, options_of
from jaxslowmo.cli.config._inspect import InspectGraphConfig, InspectGraphsConfig
from jaxslowmo.cli.config._training import PARTS, CheckpointConfig, TrainConfig, train_options


def flags_of(*names: str) -> set[str]:
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    return {flag for parameter in command.params for flag in parameter.opts if flag[:2] == "--"}


def test_train_has_an_option_for_every_field():
    flags = {flag_of(field) for field in train_options().values()}
    assert flags_of("train") == flags | {"--out"}
    assert len(flags) == sum(len(options_of(cls)) for cls in (TrainConfig, *PARTS.values()))


def test_compare_leaves_out_what_it_decides_and_what_is_of_one_run():
    missing = flags_of("train") - flags_of("compare")
    alone = {*options_of(CheckpointConfig), *options_of(ClusterConfig)}
    assert missing == {
        *map(as_flag, alone),
        *("--algorithm", "--seed", "--patience", "--statistics", "--statistics-rate"),
    }


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("compare", CompareConfig),
        ("inspect graph", InspectGraphConfig),
        ("inspect graphs", InspectGraphsConfig),
        ("tune buckets", TuneBucketsConfig),
    ],
)
def test_commands_have_an_option_for_every_field_of_their_own(command, config):
    flags = {flag_of(field) for field in options_of(config).values()} - {"NAME"}  # an argument
    assert flags
    assert flags <= flags_of(*command.split())
