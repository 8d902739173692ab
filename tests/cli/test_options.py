"""Every option of every command, called with values that are right, wrong and empty.

A call is stopped before it does anything: what is looked at is what it would have done with the
value. That the commands do it, the other tests of this folder show.
"""

from pathlib import Path
from typing import Any

import pytest
import typer

from cli.option_rows import TABLE
from jaxslowmo.cli import _app
from jaxslowmo.cli.config._training import TrainConfig, train_options

# What a call cannot do without.
NEEDS = {
    "sample": ("runs/one",),
    "launch": ("--processes", "2", "--", "train", "--out", "there"),
    "inspect graph": ("ring", "--nodes", "4"),
    "inspect schedule": ("gpipe", "--stages=4", "--microbatches=8"),
}
CASES = [(command, option) for command, rows in TABLE.items() for option in rows]


def values(config: Any) -> dict[str, Any]:
    """Of all options, by name; a command's own stand before those of training."""
    if isinstance(config, TrainConfig):
        return config.flat()
    training = values(config.train) if hasattr(config, "train") else {}
    return training | vars(config)


@pytest.fixture
def told(monkeypatch) -> dict[str, Any]:
    """What a command was asked to do, in place of doing it."""
    found: dict[str, Any] = {}

    def with_config(config, *paths):
        found.update(values(config), paths=paths)
        return 0

    inspected = ("inspect_graph", "inspect_graphs", "inspect_schedule", "inspect_config")
    for name in ("train", "compare", "sample", "tune_buckets", "tune_outer", *inspected):
        monkeypatch.setattr(f"jaxslowmo.cli._{name}.{name}", with_config)

    def supervise(argv, out, **_):
        found["paths"] = (out,)
        return 0

    def launch(processes, restarts, heartbeat_timeout, *_):
        found.update(processes=processes, restarts=restarts, heartbeat_timeout=heartbeat_timeout)
        return 0

    monkeypatch.setattr(_app, "refuse_taken_port", lambda config: None)  # looks the host up
    monkeypatch.setattr(_app, "supervise", supervise)
    monkeypatch.setattr(_app, "launch", launch)
    return found


def arguments(command: str, option: str, value: str | None, beside: tuple[str, ...]) -> list[str]:
    given = [option if value is None else f"{option}={value}"]
    needed = [*NEEDS.get(command, ())]
    if command == "launch" and option == "--processes":
        needed = needed[2:]
    if option == "--nodes":
        needed = needed[:1]
    needed = [word for word in needed if not word.startswith(f"{option}=")]
    if option in ("--phone-book", "--table") and value:
        needed = []
    return [*command.split(), *beside, *given, *needed]


@pytest.mark.parametrize(("command", "option"), CASES, ids=lambda part: part)
def test_right_wrong_and_empty_values(call, told, command, option):
    row = TABLE[command][option]
    outcome = call(*arguments(command, option, row.good, row.beside))
    assert (outcome.code, outcome.err) == (0, "")
    name = option[2:].replace("-", "_")
    named = {"json": "as_json", "schedule": "pipeline", "rate_schedule": "schedule"}
    name = named.get(name, name)
    if isinstance(row.becomes, Path) and name in ("out", "page"):
        assert row.becomes in told["paths"]
    elif "--num-processes" not in (option, *row.beside):  # else it was handed on as it is
        assert told[name] == row.becomes
    for value, words in {**row.bad, "": row.empty}.items():
        told.clear()
        outcome = call(*arguments(command, option, value, row.beside))
        assert (outcome.code, outcome.out, told) == (2, "", {})
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("\n") == 1
        assert option in outcome.err
        assert words in outcome.err


def test_no_option_is_without_a_row():
    def commands(command, path=()):
        if not hasattr(command, "commands"):
            yield " ".join(path), command
        for name, below in getattr(command, "commands", {}).items():
            yield from commands(below, (*path, name))

    options = {
        name: {p.opts[0] for p in command.params if p.param_type_name == "option"}
        for name, command in commands(typer.main.get_command(_app.app))
    }
    assert {name: set(rows) for name, rows in TABLE.items()} == options
    assert len(train_options()) + 1 == len(TABLE["train"])
    assert sum(2 + len(row.bad) for rows in TABLE.values() for row in rows.values()) >= 120
