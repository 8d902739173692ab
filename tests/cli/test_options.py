"""Every option of every command, called with values that are right, at the edge, and wrong.

A call is stopped before it does anything: what is looked at is what it would have done with the
value. That the commands do it, the other tests of this folder show.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from cli.option_rows import GOSSIP, SHARED, TABLE
from jaxslowmo.cli import _app
from jaxslowmo.cli._command_line import _off
from jaxslowmo.cli.config._commands import CONFIGS
from jaxslowmo.cli.config._options import options_of
from jaxslowmo.cli.config._training import GOES_WITH, TrainConfig, train_options
from jaxslowmo.cli.processes import _supervise
from support.exhaustive import sweep

# What a call cannot do without.
NEEDS = {
    "sample": "runs/one",
    "islands status": "run",
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
        return config.values()
    training = values(config.train) if hasattr(config, "train") else {}
    return training | vars(config)


@pytest.fixture
def told(monkeypatch) -> dict[str, Any]:
    """What a command was asked to do, in place of doing it."""
    found: dict[str, Any] = {}

    def with_config(config, *out):
        found.update(values(config))
        if out:
            (found["out"],) = out
        return 0

    def launch(processes, restarts, heartbeat_timeout, *_):
        found.update(processes=processes, restarts=restarts, heartbeat_timeout=heartbeat_timeout)
        return 0

    inspected = ("inspect_graph", "inspect_graphs", "inspect_schedule", "inspect_config")
    others = ("compare", "sample", "islands_status", "tune_buckets", "tune_outer")
    for name in ("train", *others, *inspected):
        monkeypatch.setattr(f"jaxslowmo.cli._{name}.{name}", with_config)
    monkeypatch.setattr(_supervise, "supervise", lambda argv, out, **_: found.update(out=out) or 0)
    monkeypatch.setattr(_supervise, "launch", launch)
    return found


# Commands make shared options from the same fields: one of each kind shows that they arrive.
@pytest.mark.parametrize(
    ("command", "option"),
    sweep(CASES, lambda command, option: option in (*TABLE[command], "--out", "--preset")),
    ids=lambda part: part,
)
def test_right_and_wrong_values(call, told, tmp_path, command, option):
    (tmp_path / "options.yaml").write_text("preset: tiny")
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
        if command == "inspect config":  # which writes nothing
            beside = beside.replace("--out there", "")
        if is_shared and beside.startswith("--algorithm"):
            beside = {"compare": ALL, "tune outer": OUTER.get(beside, "")}.get(command, beside)
        return call(command, beside, option if value is None else f"{option}={value}", words)

    outcome = called(row.good)
    assert (outcome.code, outcome.err) == (0, "")
    name = option[2:].replace("-", "_")
    name = NAMES.get(name, name)
    if option == "--config":
        assert told["preset"] == "tiny"
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
    assert _app.COMMANDS.keys() == TABLE.keys()
    for name in _app.COMMANDS:
        options = {*TABLE[name], *SHARED.get(name, "").split()}
        for width in (80, 60):
            monkeypatch.setenv("COLUMNS", str(width))
            shown = call(name, "--help").out
            # tyro breaks neither usage nor the sentence below; the terminal does.
            assert all(len(line) <= width for line in shown.splitlines()[4:])
            # Each begins a line of its own, within a frame where the output is UTF-8.
            assert {*re.findall(r"^[│ ] (--[\w-]+)", shown, re.MULTILINE)} == options
    for group in ("", "inspect", "tune"):
        assert "usage: jaxslowmo" in call(group, "--help").out
    assert call("--version").out.startswith("jaxslowmo 0.")


def wrong_values(other: str, values: tuple) -> list[str]:
    """The options that give another option a value with which some have no effect."""
    option = train_options()[other]
    if option.kind is bool:
        return [_off(option)]
    return [f"{option.flag}={x}" for x in option.choices if x not in values]


def right_value(name: str) -> str:
    option = train_options()[name]
    row = TABLE["train"][option.flag]
    return option.flag if row.good is None else f"{option.flag}={row.good}"


ROWS = [(name, other, values) for names, other, values in GOES_WITH for name in names.split()]


@pytest.mark.parametrize(("name", "other", "values"), ROWS, ids=lambda part: str(part))
def test_an_option_is_refused_where_nothing_uses_it_and_only_there(call, told, name, other, values):
    needed = train_options()[other]
    for value in values:
        with_it = needed.flag if value is True else f"{needed.flag}={value}"
        # A rollback needs something to go back to.
        outcome = call("train --preset=tiny --checkpoint-every=5", right_value(name), with_it)
        assert (outcome.code, outcome.err) == (0, "")
    wrong = wrong_values(other, values)
    assert wrong
    for without in wrong:
        told.clear()
        refused = call("train --preset=tiny", right_value(name), without)
        refused.is_refused(train_options()[name].flag, needed.flag)
        assert told == {}


SWITCHES = [name for name, option in train_options().items() if option.kind is bool]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_has_an_opposite(call, told, name):
    option = train_options()[name]
    row = TABLE["train"][option.flag]
    for words, value in (
        (option.flag, True),
        (_off(option), False),
        (f"{option.flag} {_off(option)}", False),
        (f"{_off(option)} {option.flag}", True),
    ):
        assert call("train --out there", row.beside, words).code == 0
        assert told[name] is value
        call("train --out there", row.beside, f"{words.split()[-1]}=x").is_refused(option.flag[2:])


PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


def test_every_option_and_every_call_of_the_page_is_one(call, told, tmp_path):
    options = [x for cls in CONFIGS.values() for x in options_of(cls).values()]
    options += train_options().values()
    known = {x.flag for x in options} | {_off(x) for x in options if x.kind is bool}
    known |= {"--help", "--logdir"}  # of all commands, and of TensorBoard
    assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE)} <= known
    calls = re.findall(r"^jaxslowmo (.*)$", PAGE, re.MULTILINE)
    assert len(calls) >= 8
    (tmp_path / "run.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.json").write_text("{}")
    for line in calls:
        outcome = call(line.partition(" #")[0])
        assert (outcome.code, outcome.err) == (0, ""), line
