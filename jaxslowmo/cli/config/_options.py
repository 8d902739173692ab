"""Options of the commands, made from fields of configurations; a check for unused options."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .._errors import CommandError, usage_errors
from ._fields import Checked, Rule, flag_of, options_of, rule_of
from ._training import PRESET_DEFAULTS, TrainConfig, train_options

_INDENT = 6
_CHOICE = "<choice>"
# Names of the parameters through which a command receives its configuration, its options of
# training, and its folder for results.
_CONFIG, _TRAIN, _OUT = "config", "train", "out"
_OF_STAGES = ("pipeline", "microbatches", "chunks", "executor")
# typer contains its own copy of click since 0.26, so take the classes that typer uses.
_CONTEXT: Any = TyperCommand.context_class
_FORMATTER: Any = _CONTEXT.formatter_class


class _Formatter(_FORMATTER):
    """A formatter that writes each option on its own line, and its help text below.

    On a narrow terminal tables of two columns would break names of options and lists of choices.
    """

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            self.write(self._wrapped(paragraph, self.current_indent))
            self.write("\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        del col_max, col_spacing
        for term, meaning in rows:
            self.write(self._wrapped(term, self.current_indent))
            self.write("\n" + self._wrapped(meaning, self.current_indent + _INDENT) + "\n")

    def _wrapped(self, text: str, indent: int) -> str:
        return textwrap.fill(
            " ".join(text.split()),
            width=max(self.width, indent + 20),
            initial_indent=" " * indent,
            subsequent_indent=" " * indent,
            break_long_words=False,  # keeps names of options whole
            break_on_hyphens=False,
        )


class _Context(_CONTEXT):
    formatter_class = _Formatter


class _Described:
    help: str | None

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the whole first paragraph, for lists of commands."""
        del limit
        return (self.help or "").strip().partition("\n\n")[0]


class Command(_Described, TyperCommand):
    """A command whose help groups options under headings."""

    context_class = _Context

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those without a heading first."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = f"{parameter.param_type_name.title()}s"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class Group(_Described, TyperGroup):
    """A group of commands whose help describes each command with a whole paragraph."""

    context_class = _Context


def with_options(
    command: Callable[..., int],
    config: type[Checked] | None = None,
    *,
    train: Collection[str] = (),
    out: str | None = None,
) -> Callable[..., int]:
    """Return `command` with a signature that holds options made from fields.

    The order is: options of `config`, parameters of `command`, `--out`, options of training.

    Args:
      command: function that receives its own parameters, `config`, and the options of training as
        the dict `train`. With both, it receives the options of `config` as keywords.
      config: configuration class of the command; help shows the defaults of its options.
      train: names of the fields of `TrainConfig` and its parts that are options of the command.
        The value of an option that is not given is None, so that presets can decide.
      out: first part of the name of the default folder, if `command` receives `out`.
    """
    fields = options_of(config) if config else {}

    def called(**options: Any) -> int:
        arguments: dict[str, Any] = {}
        with usage_errors():
            for name, field in fields.items():
                value, parse = options.pop(name), rule_of(field).parse
                if value is not None:
                    arguments[name] = parse(flag_of(field), value) if parse else value
            if config and not train:
                arguments = {_CONFIG: config(**arguments)}
        if train:
            arguments[_TRAIN] = {name: options.pop(name) for name in train}
        return command(**options, **arguments)

    replaced = {_CONFIG, _TRAIN, _OUT if out else _CONFIG}
    parameters = [_parameter(field) for field in fields.values()]
    parameters += [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in replaced
    ]
    if out:
        help = f"Folder for the results (default: runs/{out}-DATE)."
        kind = Annotated[Path | None, path_option("--out", help)]
        parameters.append(_keyword(_OUT, None, kind))
    parameters += [_train_parameter(x) for name, x in train_options().items() if name in train]
    called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__doc__ = command.__doc__
    return called


def path_option(flag: str, help: str) -> Any:
    """Return an option for a path; it refuses an empty path, which would be the current folder."""

    def parse(text: str | Path) -> Path:
        if not str(text).strip():
            raise CommandError(f"{flag} must be a path, got nothing")
        return Path(text)

    return typer.Option(help=help, show_default=False, metavar="PATH", parser=parse)


def same_option(config: type[Checked], name: str) -> Any:
    """Return an option with help and lower bound of a field of another configuration."""
    rule = rule_of(options_of(config)[name])
    return typer.Option(help=rule.help, min=rule.least)


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return the parameter for a field of a command's configuration; typer shows its default."""
    rule = rule_of(field)
    shown, flag = rule.text if rule.parse else field.default, flag_of(field)
    if not flag.startswith("--"):
        argument = typer.Argument(shown, help=rule.help, show_default=False)
        return _keyword(field.name, argument, field.type)
    option = typer.Option(
        shown if rule.shows_default else None,
        flag,
        help=_help(rule),
        show_default=rule.shows_default and shown is not None,
        metavar=_CHOICE if rule.choices else None,
    )
    kind: Any = str if rule.parse else field.type
    return _keyword(field.name, option, kind | None)


def _train_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return the parameter for an option of training; None by default, so that presets decide."""
    kind: Any = field.type
    name, rule, flag = field.name, rule_of(field), flag_of(field)
    help = _help(rule)
    if field.default is not None:
        default = str(field.default).lower() if kind is bool else field.default
        by_preset = any(name in values for values in PRESET_DEFAULTS.values())
        help += f" (default: {default}{', unless the preset has its own' if by_preset else ''})"
    option = typer.Option(
        None,
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=help,
        show_default=False,
        rich_help_panel=rule.panel,
        metavar=_CHOICE if rule.choices else None,
    )
    return _keyword(name, option, kind | None)


def _help(rule: Rule) -> str:
    """Return the help text with the choices in it, where lines can break between them."""
    return f"{rule.help} One of {', '.join(rule.choices)}." if rule.choices else rule.help


def _keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def refuse_unused(
    options: Mapping[str, Any], config: TrainConfig, algorithms: Collection[str] = ()
) -> None:
    """Raise `ValueError` if an option has no effect together with the others.

    Args:
      options: values by field name, of `TrainConfig` and its parts; None: not given.
      config: the configuration made of them, with presets and defaults.
      algorithms: the algorithms that are trained; () is the one of `config`.

    Raises:
      ValueError: the message names the first such option, its value, and what it goes with.
    """
    flat = config.flat()
    for name, field in train_options().items():
        goes_with = rule_of(field).goes_with
        if options.get(name) is None or goes_with is None:
            continue
        other, values = goes_with
        actual = set(algorithms) if other == "algorithm" and algorithms else {flat[other]}
        if not actual & set(values):
            _refuse(*_as_typed(name, options[name]), other, values, actual)
    for name in _OF_STAGES:
        if options.get(name) is not None and config.mesh.num_stages == 1:
            flag = flag_of(train_options()[name])
            raise ValueError(
                f"{flag} goes with a stage of 2 or more in --mesh; got {options[name]}"
            )
    saves = flat["checkpoint_every"] or flat["resume"]
    if options.get("on_nan") == "rollback" and not saves:
        raise ValueError("--on-nan rollback needs --checkpoint-every, for something to go back to")
    if options.get("shard_state") and not flat["exact_average"]:
        raise ValueError("--shard-state does not go with --no-exact-average, which shards nothing")
    if options.get("shard_state") and flat["codec"] != "none":
        raise ValueError(
            f"--shard-state does not go with --codec {flat['codec']}, which needs a whole anchor"
        )


def check_setting(algorithm: str, name: str, value: Any) -> None:
    """Raise `ValueError` if an algorithm of a comparison does not use one of its settings.

    Raises:
      ValueError: the message names the setting, its value, and what it goes with.
    """
    goes_with = rule_of(train_options()[name]).goes_with
    if goes_with is not None and algorithm not in goes_with[1]:
        text = str(value).lower() if isinstance(value, bool) else value
        _refuse(name, f"; got {text}", *goes_with, {algorithm})


def _as_typed(name: str, value: Any) -> tuple[str, str]:
    """Return an option as the user typed it, and its value in words; a switch has no value."""
    flag = flag_of(train_options()[name])
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}", ""
    return flag, f"; got {value}"


def _refuse(
    what: str, got: str, other: str, values: Collection[Any], actual: Collection[Any]
) -> None:
    flag = flag_of(train_options()[other])
    if set(values) == {True}:
        raise ValueError(f"{what} goes with {flag}, which was not given{got}")
    required, got_instead = " or ".join(map(str, values)), ", ".join(sorted(actual))
    raise ValueError(f"{what} goes with {flag} {required}, not with {got_instead}{got}")
