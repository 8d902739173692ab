"""What users are told of what they give: errors about arguments, and warnings at their own line."""

import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args

# Between the line of a user and ours stand, for one, the frames of what traces a program.
_NOT_THE_USER = frozenset({"jaxslowmo", "jax", "jaxlib", "optax", "contextlib", "functools"})


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


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the innermost line that is neither ours nor jax's or optax's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) in _NOT_THE_USER:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_once() -> Callable[[str], None]:
    """A function that issues each message as a `UserWarning` the first time only."""
    seen: set[str] = set()

    def warn(message: str) -> None:
        if message not in seen:
            seen.add(message)
            warn_user(message)

    return warn


def _package_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]
