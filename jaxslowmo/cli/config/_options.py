"""Options of commands: fields of frozen dataclasses, whose annotations say which values are right.

Annotations hold rules, functions `rule(flag, value)` that raise a `ValueError` with the name of the
option. The docstring below a field is its help text.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from .._errors import as_flag

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmg", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}


class Range(NamedTuple):
    """The rule that a number, or each number of a list, is at least `least` and below `below`."""

    least: float
    below: float = 2**31  # counters in training states are int32

    def __call__(self, flag: str, value: float) -> None:
        """Raise `ValueError` for a number outside the range, and for NaN."""
        if not value >= self.least:
            raise ValueError(f"{flag} must be >= {self.least}, got {value}")
        if not value < self.below:
            raise ValueError(f"{flag} must be < {self.below}, got {value}")


class OneOf:
    """The rule that a text is one of several names."""

    def __init__(self, *names: str):
        self.names = names

    def __call__(self, flag: str, value: str) -> None:
        """Raise `ValueError` for any other name."""
        if value not in self.names:
            raise ValueError(f"{flag} must be one of {', '.join(self.names)}, got {value}")


class Form(NamedTuple):
    """The rule that a text has the form of a regular expression, which `words` describe."""

    pattern: str
    words: str

    def __call__(self, flag: str, value: str) -> None:
        """Raise `ValueError` for a text of another form."""
        if not re.fullmatch(self.pattern, value, re.ASCII):
            raise ValueError(f"{flag} must be {self.words}, got {value}")


class Called(NamedTuple):
    """The name of an option that is not "--" and its field's name.

    A name without "--" is that of an argument; a field that is called None is no option.
    """

    flag: str | None


class Read(NamedTuple):
    """How the text of an option becomes its value: `parse(flag, text)`."""

    parse: Callable[[str, str], Any]


def read_size(flag: str, text: str) -> int:
    """Return the bytes of a size like "25MiB".

    Raises:
      ValueError: the text is no size; the message names `flag`.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{flag} takes sizes such as 25MiB, 500kB or 4096, got {text}")
    return round(float(match[1]) * _UNITS[match[2].lower()])


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0, math.inf)]
Share = Annotated[float, Range(0, 1)]
Size = Annotated[int, Read(read_size), Range(0, math.inf)]
# jax uses 32 bits of a seed: seeds that differ only in higher bits give the same keys.
Seed = Annotated[int, Range(0, 2**32)]


@dataclasses.dataclass(frozen=True)
class Option:
    """A command-line option, or an argument, that sets a field.

    Attributes:
      name: name of the field.
      flag: name of the option, such as "--sync-every"; without "--" that of an argument.
      kind: type of the value, or of the entries of a list.
      is_list: whether the value is a tuple, written with commas.
      choices: all right values; () allows any that pass the rules.
      rules: further rules of the value, or of each entry.
      parse: `parse(flag, text)` returns the value, or an entry, that a text stands for.
      default: value of an option that is not given; `dataclasses.MISSING`: it must be given.
      owner: class whose docstrings have the help text.
    """

    name: str
    flag: str
    kind: type
    is_list: bool
    choices: tuple[str, ...]
    rules: tuple[Callable[[str, Any], Any], ...]
    parse: Callable[[str, str], Any]
    default: Any
    owner: type

    def read(self, text: str) -> Any:
        """Return the value that a text stands for; raise `ValueError` if it is none."""
        if not text:
            raise ValueError(f"{self.flag} must not be empty")
        parts = [part.strip() for part in text.split(",") if part.strip()]
        values = tuple(self.parse(self.flag, part) for part in (parts if self.is_list else [text]))
        value = values if self.is_list else values[0]
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raise `ValueError` for a value that breaks a rule."""
        entries = value if self.is_list else (value,)
        if not entries or len({*entries}) < len(entries):
            listed = ",".join(map(str, entries)) or "nothing"
            raise ValueError(f"{self.flag} must list one or more different values, got {listed}")
        for entry in entries:
            if isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError(f"{self.flag} must be a finite number, got {entry}")
            for rule in self.rules:
                rule(self.flag, entry)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the types and the metadata of an annotation; `tuple` stands for a list."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        yield tuple
    if origin is Annotated:
        yield from arguments[1:]
        arguments = arguments[:1]
    if origin in (tuple, Annotated, Union, UnionType):
        for argument in arguments:
            yield from _parts(argument)
    else:
        yield hint


def _parsed(kind: type, flag: str, text: str) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{flag} must be {_KINDS[kind]}, got {text}") from None


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the options of a class by the names of its fields, without those of its parts."""
    hints, options = get_type_hints(cls, include_extras=True), {}
    for field in dataclasses.fields(cls):
        parts = [*_parts(hints[field.name])]
        kinds = [kind for kind in _KINDS if kind in parts]
        flag = next((x.flag for x in parts if isinstance(x, Called)), as_flag(field.name))
        if not kinds or flag is None:
            continue
        reads = [x.parse for x in parts if isinstance(x, Read)]
        marks = (Called, Read, type)
        options[field.name] = Option(
            field.name,
            flag,
            kinds[0],
            is_list=tuple in parts,
            choices=next((x.names for x in parts if isinstance(x, OneOf)), ()),
            rules=tuple(x for x in parts if callable(x) and not isinstance(x, marks)),
            parse=reads[0] if reads else functools.partial(_parsed, kinds[0]),
            default=field.default,
            owner=next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c)),
        )
    return options


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of configurations: a `ValueError` names the option whose value breaks a rule."""

    HEADING: ClassVar[str] = ""  # of these options in `--help`

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            if getattr(self, name) is not None:
                option.check(getattr(self, name))

    @classmethod
    def shared(cls) -> dict[str, Option]:
        """Return further options of the command, which are no fields of this class."""
        return {}

    @classmethod
    def made_of(cls, given: Mapping[str, Any], file: Mapping[str, Any]) -> Self:
        """Return the configuration of a command.

        Args:
          given: values of the command line by field name.
          file: values of the configuration file, likewise.

        Raises:
          ValueError: a value breaks a rule, or an option that must be given is not.
        """
        values = {**file, **given}
        for name, option in options_of(cls).items():
            if option.default is dataclasses.MISSING and name not in values:
                raise ValueError(f"{option.flag} must be given")
        return cls(**values)
