"""Command-line options out of configuration fields, so that neither can lack what the other has."""

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, get_type_hints

import typer

from .._errors import CommandError, usage_errors
from ._fields import Checked, Rule, flag_of, options_of
from ._train import PRESET_DEFAULTS, train_options

# The parameter of a command that takes the options of a `TrainConfig`.
TRAIN = "train"
_CHOICE = "<choice>"


def with_options(
    command: Callable[..., None],
    config: type[Checked] | None = None,
    *,
    train: Collection[str] = (),
) -> Callable[..., None]:
    """`command` with options made from fields in its signature.

    They stand in this order: those of `config`, the command's own parameters, those of training.

    Args:
      command: takes what was given of `config` as keywords, and of training as the dict `train`.
      config: of the command, whose options show their defaults.
      train: names of the fields of a `TrainConfig` and its parts that are options, too. None
        stands for one that was not given: presets decide.
    """
    hints = get_type_hints(config) if config else {}
    own = options_of(config) if config else {}

    def called(**options: Any) -> None:
        given: dict[str, Any] = {}
        with usage_errors():
            for name, (_, rule) in own.items():
                value = options.pop(name)
                if value is not None:
                    given[name] = rule.parse(flag_of(name, rule), value) if rule.parse else value
        if train:
            given[TRAIN] = {name: options.pop(name) for name in train}
        command(**options, **given)

    parameters = [_parameter(name, hints[name], field, rule) for name, (field, rule) in own.items()]
    parameters += [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name != TRAIN
    ]
    parameters += [
        _train_parameter(name, *found) for name, found in train_options().items() if name in train
    ]
    called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__doc__ = command.__doc__
    return called


def folder_option(command: str) -> Any:
    """The option `--out` of a command."""
    return path_option("--out", f"Folder for the results (default: runs/{command}-DATE).")


def path_option(flag: str, help: str) -> Any:
    """An option that takes a path, and refuses an empty one, which would be the folder at hand."""

    def parse(text: str | Path) -> Path:
        if not str(text).strip():
            raise CommandError(f"{flag} must be a path, got nothing")
        return Path(text)

    return typer.Option(help=help, show_default=False, metavar="PATH", parser=parse)


def same_option(config: type[Checked], name: str) -> Any:
    """The option of a field of another command's configuration."""
    _, rule = options_of(config)[name]
    return typer.Option(help=rule.help, min=rule.least)


def _parameter(name: str, kind: Any, field: Any, rule: Rule) -> inspect.Parameter:
    """Of a command's own configuration: typer shows the default."""
    flag = flag_of(name, rule)
    shown = rule.text if rule.parse else field.default
    option = typer.Option(
        shown if rule.shows_default else None,
        flag,
        help=_help(rule),
        show_default=rule.shows_default and shown is not None,
        metavar=_CHOICE if rule.choices else None,
    )
    return _optional(name, str if rule.parse else kind, option)


def _train_parameter(name: str, kind: Any, field: Any, rule: Rule) -> inspect.Parameter:
    """Of training: whether it was given decides between its value and the preset's."""
    flag, help = flag_of(name, rule), _help(rule)
    if field.default is not None:
        default = str(field.default).lower() if kind is bool else field.default
        by_preset = any(name in values for values in PRESET_DEFAULTS.values())
        help += f" (default: {default}{', if the preset has no own' if by_preset else ''})"
    option = typer.Option(
        None,
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=help,
        show_default=False,
        rich_help_panel=rule.panel,
        metavar=_CHOICE if rule.choices else None,
    )
    return _optional(name, kind, option)


def _help(rule: Rule) -> str:
    """With the choices as words between which lines can break, and not in one piece as the type."""
    return f"{rule.help} One of {', '.join(rule.choices)}." if rule.choices else rule.help


def _optional(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None
    )
