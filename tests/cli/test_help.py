"""`--help` of every command: all words whole, at any width."""

import pytest
import typer

from jaxslowmo.cli._app import app


def commands(command, path=()):
    """Every command with its path, groups too."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "jaxslowmo")
def test_words_are_whole_and_lines_fit(call, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    usual = call(*path, "--help")
    assert (usual.code, usual.err) == (0, "")
    words = usual.out.split()
    for parameter in COMMANDS[path].params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            assert flag in words
        assert parameter.help
    monkeypatch.setenv("COLUMNS", "60")
    narrow = call(*path, "--help").out
    assert narrow.split() == words
    for shown, width in ((usual.out, 80), (narrow, 60)):
        # A word that is wider has a line of its own.
        assert all(len(line) <= width or len(line.split()) == 1 for line in shown.splitlines())


def test_options_stand_below_their_headings_and_commands_say_what_they_are_for(call):
    train = call("train", "--help").out
    headings = [line for line in train.splitlines() if line and line[0] != " "][1:]
    assert headings == [
        f"{name}:"
        for name in (
            *("Options", "Model", "Training", "Devices", "Algorithm", "Optimizer", "Checkpoints"),
            "Cluster",
        )
    ]
    assert "        Folder for the results (default: runs/train-DATE).\n" in train
    assert "One of adamw, sgd. (default: adamw)" in train
    assert "equal steps and seeds: a table and a figure. launch" in " ".join(
        call("--help").out.split()
    )
