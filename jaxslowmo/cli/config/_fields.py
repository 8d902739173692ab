"""Dataclass fields that are options of the command line: their rules and help texts."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection
from typing import Any

from .._errors import as_flag

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmg", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_KEY = "rule"
# The bound of integer options that state none: counters in training states are int32.
_TOO_MANY = 2**31


@dataclasses.dataclass(frozen=True)
class Rule:
    """The command-line option of a field: its help text, its allowed values, its parser.

    Attributes:
      help: text in `--help`.
      panel: heading in `--help` under which the option is listed; None: the command's own options.
      choices: all allowed values; () allows any.
      least: lower bound, for a list of each entry.
      below: exclusive upper bound, for a list of each entry; the default for integers is 2**31.
      check: `check(value)` raises a `ValueError` that names the option; called for each entry of a
        list.
      entries: word for the entries of a list in error messages.
      parse: `parse(flag, text)` returns the value of an option that is given as text.
      text: the default of an option with `parse`, as text.
      shows_default: whether `--help` shows the default.
      flag: name of the option, if that is not "--" and the field's name; a name without "--" is an
        argument.
      goes_with: name of another field, and the values of it with which this option has an effect;
        None: it always has.
    """

    help: str
    panel: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    check: Callable[[Any], Any] | None = None
    entries: str = "values"
    parse: Callable[[str, str], Any] | None = None
    text: str | None = None
    shows_default: bool = True
    flag: str | None = None
    goes_with: tuple[str, tuple[Any, ...]] | None = None


def option(
    default: Any, help: str, *, parse: Callable[[str, str], Any] | None = None, **rule: Any
) -> Any:
    """Return a dataclass field that is a command-line option.

    Args:
      default: the value of an option that is not given, unless a preset has another; with
        `parse` as text.
      help: attribute `help` of `Rule`.
      parse: attribute `parse` of `Rule`.
      **rule: further attributes of `Rule`.
    """
    text, value = (default, parse("", default)) if parse else (None, default)
    rules = Rule(help, parse=parse, text=text, **rule)
    return dataclasses.field(default=value, metadata={_KEY: rules})


def options_of(config: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return those fields of a configuration, or its class, that are options, by name."""
    return {field.name: field for field in dataclasses.fields(config) if _KEY in field.metadata}


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """Return the rule of a field that is an option."""
    return field.metadata[_KEY]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of the option of a field, such as "--sync-every"."""
    return rule_of(field).flag or as_flag(field.name)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Base of configurations: raises a `ValueError` where a value breaks the rule of its option."""

    def __post_init__(self) -> None:
        for name, field in options_of(self).items():
            value = getattr(self, name)
            if value is not None:
                _check(flag_of(field), rule_of(field), value)


def _check(flag: str, rule: Rule, value: Any) -> None:
    if isinstance(value, tuple):
        check_different(flag, value, rule.entries)
    if rule.choices and value not in rule.choices:
        raise ValueError(
            f"{flag} must be one of {', '.join(rule.choices)}, got {value or 'nothing'}"
        )
    if value == "":
        raise ValueError(f"{flag} must not be empty")
    for entry in value if isinstance(value, tuple) else (value,):
        # Written so that NaN fails, too.
        if rule.least is not None and not entry >= rule.least:
            raise ValueError(f"{flag} must be >= {rule.least}, got {entry}")
        is_count = isinstance(value, int) and not isinstance(value, bool)
        below = _TOO_MANY if rule.below is None and is_count else rule.below
        if below is not None and not entry < below:
            raise ValueError(f"{flag} must be < {below}, got {entry}")
        if isinstance(entry, float) and not math.isfinite(entry):
            raise ValueError(f"{flag} must be a finite number, got {entry}")
        if rule.check is not None:
            rule.check(entry)


def check_different(flag: str, values: Collection[Any], what: str = "values") -> None:
    """Raise a `ValueError` that names `flag` if a list is empty or repeats a value."""
    if not values or len(set(values)) < len(values):
        listed = ",".join(map(str, values)) or "nothing"
        raise ValueError(f"{flag} must list one or more different {what}, got {listed}")


def parse_names(flag: str, text: str) -> tuple[str, ...]:
    """Return the names in a list like "ring, star"."""
    del flag
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_integers(flag: str, text: str) -> tuple[int, ...]:
    """Return the numbers in a list like "4,8".

    Raises:
      ValueError: an entry is no integer; the message names `flag`.
    """
    return _parse_list(flag, text, int, "integers")


def parse_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers in a list like "0.7,1".

    Raises:
      ValueError: an entry is no number; the message names `flag`.
    """
    return _parse_list(flag, text, float, "numbers")


def _parse_list(flag: str, text: str, kind: Callable[[str], Any], what: str) -> tuple[Any, ...]:
    try:
        return tuple(map(kind, parse_names(flag, text)))
    except ValueError:
        raise ValueError(f"{flag} must be {what} separated by commas, got {text}") from None


def parse_sizes(flag: str, text: str) -> tuple[int, ...]:
    """Return the sizes in bytes in a list like "1MiB,25MB,4096".

    Raises:
      ValueError: an entry is no size; the message names `flag`.
    """
    return tuple(parse_size(flag, part) for part in parse_names(flag, text))


def parse_size(flag: str, text: str) -> int:
    """Return the bytes of a size like "25MiB".

    Raises:
      ValueError: the text is no size; the message names `flag`.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{flag} takes sizes such as 25MiB, 500kB or 4096, got {text.strip() or 'nothing'}"
        )
    return round(float(match[1]) * _UNITS[match[2].lower()])
