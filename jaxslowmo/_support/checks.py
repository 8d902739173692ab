"""Checks of arguments: counts, and one of a few names."""

import operator
from typing import Any, get_args


def as_int(value: Any, least: int | None = None) -> int | None:
    """Return `value` as an int; None if it is no integer, or is a bool, or is below `least`."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if least is not None and number < least else number


def checked_int(what: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int, as `as_int` does, or raise `ValueError`.

    Args:
      what: begins the message, up to "must be": the argument, and what it counts.
      value: what was given as the argument.
      least: the smallest that it may be.
    """
    number = as_int(value, least)
    if number is None:
        rule = "an int" if least is None else f"an int >= {least}"
        raise ValueError(f"{what} must be {rule}, got {value!r}.")
    return number


def check_choice(argument: str, value: Any, kind: Any, owner: str = "") -> None:
    """Raise `ValueError` unless `value` is one of the names in `kind`, a `Literal` of strings.

    `owner` is a public name for the message; "" leaves it out.
    """
    if not isinstance(value, str) or value not in get_args(kind):
        *others, last = (f'"{name}"' for name in get_args(kind))
        rule = f"`{argument}` must be {', '.join(others)} or {last}, got {value!r}."
        raise ValueError(f"{owner}: {rule}" if owner else rule)
