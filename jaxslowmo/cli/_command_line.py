"""The command line as a configuration; tyro splits it into options and writes the help."""

import contextlib
import dataclasses
import difflib
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from ._errors import CommandError, file_errors
from .config._commands import OfRuns
from .config._options import Option, Options, options_of
from .config._training import PRESET_DEFAULTS, train_options

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
# The config.json of a run says how the run was started, too; the next one starts in its own way.
_OF_A_START = {
    *("not_given", "resume", "overwrite"),
    *("coordinator", "coordinator_bind", "num_processes", "process_id"),
}


def configured(cls: type[Options], program: str, words: Sequence[str], about: str = "") -> Any:
    """Return the configuration that the words after the name of a command describe.

    Args:
      cls: class of the configuration.
      program: what stands before the words.
      words: options, their values, and arguments.
      about: what the command does, for the help.

    Raises:
      CommandError: an option is unknown, lacks its value, has a wrong one, or has no effect.
      SystemExit: the words ask for help, which is printed.
    """
    shared = cls.shared() if issubclass(cls, OfRuns) else {}
    options = options_of(cls) | shared
    given = _given(cls, options, program, words, about)
    try:
        if issubclass(cls, OfRuns):
            path = given.get("config")
            return cls.made_of(given, {} if path is None else read_file(cls, path))
        for name, option in options.items():
            if option.default is dataclasses.MISSING and name not in given:
                raise ValueError(f"{option.flag} must be given")
        return cls(**given)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _given(
    cls: type, options: Mapping[str, Option], program: str, words: Sequence[str], about: str
) -> dict[str, Any]:
    """Return the values that words give to options, by the names of the fields."""
    flags = [f for x in options.values() if x.flag.startswith("--") for f in _flags(x)]
    switches = {f for x in options.values() if x.kind is bool for f in _flags(x)}
    named = [word.partition("=")[0].replace("_", "-") for word in words]
    for flag, word in zip(named, words, strict=True):
        if "=" in word and flag in switches:
            raise CommandError(f"{flag} takes no value, got {word.partition('=')[2] or 'nothing'}")
    kind = _typed(cls, options, is_help=not {"-h", "--help"}.isdisjoint(words))
    try:
        # tyro frames its errors in a box; here an error is one line.
        with contextlib.redirect_stderr(io.StringIO()):
            groups, unknown = tyro.cli(
                kind,
                prog=program,
                description=about,
                args=words,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as error:
        if not error.code:
            raise
        # With options that may all be left out, any text for a value, and unknown words returned,
        # the only error is that no value follows an option.
        lacking = [
            flag
            for flag, word, following in zip(named, words, [*words[1:], "--"], strict=True)
            if flag in flags and flag not in switches and "=" not in word
            if following.startswith("-") and not following[1:2].isdigit()
        ]
        raise CommandError(f"{lacking[0]} must be followed by a value") from None
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise CommandError(f"no such option or argument: {unknown[0]}{hint}; see {program} --help")
    values = {x: v for part in groups.values() if isinstance(part, dict) for x, v in part.items()}
    values |= {x: value for x, value in groups.items() if not isinstance(value, dict)}
    try:
        return {
            x: value if isinstance(value, bool) else options[x].read(value)
            for x, value in values.items()
        }
    except ValueError as error:
        raise CommandError(str(error)) from None


def _flags(option: Option) -> tuple[str, ...]:
    return (option.flag, f"--no-{option.flag[2:]}") if option.kind is bool else (option.flag,)


def _typed(cls: type, options: Mapping[str, Option], *, is_help: bool) -> Any:
    """Return the type from which tyro makes the options: texts and switches, under headings."""
    groups: dict[str, dict[str, Any]] = {}
    for name, option in options.items():
        help, hint = _help(option) if is_help else ("", "")
        about = tyro.conf.arg(
            name=option.flag.removeprefix("--"),
            metavar=None if option.kind is bool else _metavar(option),
            help=help,
            help_behavior_hint=hint,
        )
        kind: Any = Annotated[bool if option.kind is bool else str, about]
        if not option.flag.startswith("--"):
            kind = tyro.conf.Positional[kind]
        heading = "" if issubclass(cls, option.owner) else option.owner.HEADING
        groups.setdefault(heading, {})[name] = kind
    fields = groups.pop("", {})
    for heading, of_heading in groups.items():
        kind = TypedDict(heading, of_heading, total=False)  # pyright: ignore
        # Without a text of its own tyro looks for one in the source of the type.
        fields[heading] = Annotated[kind, tyro.conf.arg(name=heading, help=" ")]
    return TypedDict(cls.__name__, fields, total=False)  # pyright: ignore


def _metavar(option: Option) -> str:
    if not option.flag.startswith("--"):
        return option.flag
    metavar = "NAME" if option.choices else _METAVARS[option.kind]
    return f"{metavar},{metavar},..." if option.is_list else metavar


def _help(option: Option) -> tuple[str, str]:
    """Return the help text of an option, and what it says about the default."""
    text, default = " ".join(_docs(option.owner)[option.name].split()), option.default
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if default is dataclasses.MISSING:
        return text, "(required)"
    if default is None or "(default" in text:
        return text, ""
    if option.is_list:
        default = ",".join(map(str, default))
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown.lower() if option.kind is bool else shown
    is_of_presets = any(option.name in values for values in PRESET_DEFAULTS.values())
    if is_of_presets and option.name in train_options():
        shown += ", unless the preset has its own"
    return text, f"(default: {shown})"


@functools.cache
def _docs(owner: type) -> dict[str, str]:
    import docstring_parser  # parses the source of the class, only for help

    found = docstring_parser.parse_from_object(owner).params
    return {param.arg_name: param.description or "" for param in found}


def read_file(cls: type[OfRuns], path: Path) -> dict[str, Any]:
    """Return the values in a YAML or JSON file, by the names of fields.

    Args:
      cls: class of the configuration for which it is read.
      path: path of the file: a mapping from names of options, with - or _, to values; values in a
        mapping below stand under the names of fields, as in config.json of a run.

    Raises:
      ValueError: the file holds no mapping, a name is no option, or its value is wrong; the message
        names the file.
    """
    options = train_options() | {x: o for x, o in options_of(cls).items() if x != "config"}
    by_flag = {option.flag[2:]: option for option in options.values()}
    try:
        with file_errors("--config", "read", path):
            text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else _yaml(text)
        if not isinstance(content, dict):
            raise ValueError("must be a mapping from names of options to values")
        values, leaves = {}, [*_leaves(content)]
        left_out = _OF_A_START if "not_given" in {keys[-1] for keys, _ in leaves} else ()
        for (*above, key), value in leaves:
            option = options.get(key) if above else by_flag.get(str(key).replace("_", "-"))
            if value is None or key in left_out:
                continue
            if option is None:
                raise ValueError(f"{key} is no option; see jaxslowmo train --help")
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            values[option.name] = option.read(shown)
        return values
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None


def _yaml(text: str) -> Any:
    import yaml  # only for such a file

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {error}") from None


def _leaves(content: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the keys on the way to each value that is no mapping, and the value."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
