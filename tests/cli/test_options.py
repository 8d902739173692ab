"""Every option of every command, called with values that are right, at the edge, and wrong.

A call is stopped before it does anything: what is looked at is what it would have done with the
value. That the commands do it, the other tests of this folder show.
"""

from pathlib import Path
from typing import Any

import pytest
import typer

from cli.option_rows import GOSSIP, SHARED, TABLE
from jaxslowmo.cli import _app
from jaxslowmo.cli.config._training import TrainConfig
from support.exhaustive import sweep

# What a call cannot do without.
NEEDS = {
    "sample": "runs/one",
    "launch": "--processes 2 -- train --out there",
    "inspect graph": "ring --nodes 4",
    "inspect schedule": "gpipe --stages=4 --microbatches=8",
}
# In place of the one algorithm of a run: some that need the option, and one with slow steps.
ALL = "--algorithms all_reduce,local_sgd,sgp,slowmo,diloco"
OUTER = {GOSSIP: "--algorithm slowmo_sgp"}
CASES = [(command, option) for command, rows in TABLE.items() for option in rows]
CASES += [(command, option) for command, names in SHARED.items() for option in names.split()]
NAMES = {"json": "as_json", "schedule": "pipeline", "rate_schedule": "schedule"}


def values(config: Any) -> dict[str, Any]:
    """Return values of all options by name; a command's own replace those of training."""
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

    def launch(processes, restarts, heartbeat_timeout, *_):
        found.update(processes=processes, restarts=restarts, heartbeat_timeout=heartbeat_timeout)
        return 0

    inspected = ("inspect_graph", "inspect_graphs", "inspect_schedule", "inspect_config")
    for name in ("train", "compare", "sample", "tune_buckets", "tune_outer", *inspected):
        monkeypatch.setattr(f"jaxslowmo.cli._{name}.{name}", with_config)
    monkeypatch.setattr(_app, "refuse_taken_port", lambda config: None)  # looks the host up
    monkeypatch.setattr(_app, "supervise", lambda argv, out, **_: found.update(paths=(out,)))
    monkeypatch.setattr(_app, "launch", launch)
    return found


# Commands make shared options from the same fields: one of each kind shows that they arrive.
@pytest.mark.parametrize(
    ("command", "option"),
    sweep(CASES, lambda command, option: option in (*TABLE[command], "--out", "--preset")),
    ids=lambda part: part,
)
def test_right_and_wrong_values(call, told, command, option):
    is_shared = option not in TABLE[command]
    row = TABLE["train" if is_shared else command][option]

    def called(value):
        words = NEEDS.get(command, "")
        if (command, option) == ("launch", "--processes"):
            words = words.partition(" -- ")[2] and f"-- {words.partition(' -- ')[2]}"
        if option == "--nodes" and command == "inspect graph":
            words = "ring"
        words = " ".join(word for word in words.split() if not word.startswith(f"{option}="))
        if option in ("--phone-book", "--table") and value != "''":
            words = ""
        beside = row.beside
        if is_shared and beside.startswith("--algorithm"):
            beside = {"compare": ALL, "tune outer": OUTER.get(beside, "")}.get(command, beside)
        return call(command, beside, option if value is None else f"{option}={value}", words)

    outcome = called(row.good)
    assert (outcome.code, outcome.err) == (0, "")
    name = option[2:].replace("-", "_")
    name = NAMES.get(name, name)
    if isinstance(row.becomes, Path) and name in ("out", "page"):
        assert row.becomes in told["paths"]
    elif "--num-processes" not in f"{option} {row.beside}":  # else it was handed on as it is
        assert told[name] == row.becomes
    if is_shared:
        return
    for value in row.edges:
        assert called(value).code == 0, value
    for value in (*row.bad, "''"):
        told.clear()
        called(value).is_refused(option)
        assert told == {}


def test_no_option_is_without_a_row_and_help_shows_them_at_any_width(call, monkeypatch):
    def commands(command, path=""):
        if not hasattr(command, "commands"):
            yield path.strip(), command
        for name, below in getattr(command, "commands", {}).items():
            yield from commands(below, f"{path} {name}")

    found = dict(commands(typer.main.get_command(_app.app)))
    for name, command in found.items():
        options = {p.opts[0] for p in command.params if p.param_type_name == "option"}
        assert options == {*TABLE[name], *SHARED.get(name, "").split()}
        shown = []
        for width in (80, 60):
            monkeypatch.setenv("COLUMNS", str(width))
            shown.append(call(name, "--help").out)
            # A word that is wider has a line of its own.
            lines = shown[-1].splitlines()
            assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
        assert shown[0].split() == shown[1].split()
        assert options <= set(shown[0].split())
    assert found.keys() == TABLE.keys()
    for group in ("", "inspect", "tune"):
        assert "Usage: jaxslowmo" in call(group, "--help").out
    assert call("--version").out.startswith("jaxslowmo 0.")
