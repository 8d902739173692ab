"""The command line as a configuration; tyro splits it into options and writes the help."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from ._errors import file_errors
from .config._options import Option, Options, options_of, read_size
from .config._training import PRESET_DEFAULTS, train_options

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def configured(cls: type[Options], program: str, words: Sequence[str], about: str = "") -> Any:
    """Return the configuration that the words after the name of a command describe.

    Args:
      cls: class of the configuration.
      program: what stands before the words.
      words: options, their values, and arguments.
      about: what the command does, for the help.

    Raises:
      ValueError: an option is unknown, lacks its value, has a wrong one, or has no effect.
      SystemExit: the words ask for help, which is printed.
    """
    options = options_of(cls) | cls.shared()
    given = {
        name: value if isinstance(value, bool) else options[name].read(value)
        for name, value in _given(cls, options, program, words, about).items()
    }
    path: Any = given.get("config")
    return cls.made_of(given, {} if path is None else read_file(cls, path))


def _given(
    cls: type, options: Mapping[str, Option], program: str, words: Sequence[str], about: str
) -> dict[str, Any]:
    """Return the texts that words give to options, and of switches whether they are on."""
    switches = [flag for x in options.values() if x.kind is bool for flag in (x.flag, _off(x))]
    valued = [x.flag for x in options.values() if x.kind is not bool and x.flag[:2] == "--"]
    flags, joined, rest = [*switches, *valued], [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if equals and flag in switches:
            raise ValueError(f"{flag} takes no value, got {value or 'nothing'}")
        if not equals and flag in valued:
            # tyro takes a value that begins with a dash for an option.
            value = next(rest, "--")
            if value == "--" or value.partition("=")[0] in flags:
                raise ValueError(f"{flag} must be followed by a value")
        joined.append(f"{flag}={value}" if flag in valued else word)
    kind = _typed(cls, options, is_help=not {"-h", "--help"}.isdisjoint(joined))
    groups, unknown = tyro.cli(
        kind, prog=program, description=about, args=joined, return_unknown_args=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1, 0.75)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f"no such option or argument: {unknown[0]}{hint}; see {program} --help")
    values = {x: v for part in groups.values() if isinstance(part, dict) for x, v in part.items()}
    return values | {x: value for x, value in groups.items() if not isinstance(value, dict)}


def _off(switch: Option) -> str:
    return f"--no-{switch.flag[2:]}"


def _typed(cls: type, options: Mapping[str, Option], *, is_help: bool) -> Any:
    """Return the type from which tyro makes the options: texts and switches, under headings."""
    groups: dict[str, dict[str, Any]] = {}
    for name, option in options.items():
        is_named, is_switch = option.flag.startswith("--"), option.kind is bool
        metavar = "NAME" if option.choices else _METAVARS.get(option.kind)
        metavar = "SIZE" if option.parse is read_size else metavar
        metavar = f"{metavar},{metavar},..." if option.is_list else metavar
        help, hint = _help(option) if is_help else ("", "")
        about = tyro.conf.arg(
            name=option.flag.removeprefix("--"),
            metavar=metavar if is_named else option.flag,
            help=help,
            help_behavior_hint=hint,
        )
        kind: Any = Annotated[bool if is_switch else str, about]
        heading = "" if issubclass(cls, option.owner) else option.owner.HEADING
        of_heading = groups.setdefault(heading, {})
        of_heading[name] = kind if is_named else tyro.conf.Positional[kind]
    fields = groups.pop("", {})
    for heading, of_heading in groups.items():
        # Without a text of its own tyro looks for one in the source of the type.
        about = tyro.conf.arg(name=heading, help=" ")
        fields[heading] = Annotated[TypedDict(heading, of_heading, total=False), about]  # pyright: ignore
    return TypedDict(cls.__name__, fields, total=False)  # pyright: ignore


def _help(option: Option) -> tuple[str, str]:
    """Return the help text of an option, and what it says about the default."""
    owner, default = option.owner, option.default
    text = " ".join(_docs(owner.__module__)[owner.__name__, option.name].split())
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if default is dataclasses.MISSING:
        return text, "(required)"
    if default is None or "(default" in text:
        return text, ""
    entries = default if isinstance(default, tuple) else (default,)
    shown = ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in entries)
    if any(option.name in values for values in PRESET_DEFAULTS.values()):
        shown += ", unless the preset has its own" * (option is train_options().get(option.name))
    return text, f"(default: {shown.lower() if option.kind is bool else shown})"


@functools.cache
def _docs(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields of all classes in a module, by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (cls.name, ast.unparse(field.target)): ast.literal_eval(text.value)
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for field, text in itertools.pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def read_file(cls: type[Options], path: Path) -> dict[str, Any]:
    """Return the values in a YAML or JSON file, by the names of fields.

    Args:
      cls: class of the configuration for which it is read.
      path: path of the file: a mapping from names of options, with - or _, to values.

    Raises:
      ValueError: the file holds no mapping, a name is no option, or its value is wrong; the message
        names the file.
    """
    options = train_options() | {x: o for x, o in options_of(cls).items() if x != "config"}
    by_flag = {option.flag[2:]: option for option in options.values()}
    try:
        with file_errors("--config", "read", path):
            text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.suffix == ".json" else _yaml(text)
        if not isinstance(content, dict):
            raise ValueError("must be a mapping from names of options to values")
        values = {}
        for key, value in content.items():
            option = by_flag.get(str(key).replace("_", "-"))
            if option is None:
                raise ValueError(f"{key} is no option; see jaxslowmo train --help")
            if option.name in values:
                raise ValueError(f"{key} stands there twice")
            if isinstance(value, dict):
                raise ValueError(f"{key} must be a value, not a group of values")
            if value is not None:
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
