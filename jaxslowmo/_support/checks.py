"""Checks of arguments, warnings at the line of the user's code, and settings to compare later."""

import functools
import inspect
import math
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args

import numpy as np

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Frames of these packages are between the user's line and ours, such as those that trace a program.
_NOT_THE_USER = frozenset({"jaxslowmo", "jax", "jaxlib", "optax", "contextlib", "functools"})


class ArgumentError(ValueError):
    """The error that a function refuses one of its arguments.

    Attributes:
      argument: name of the argument.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(argument, message)
        self.argument = argument

    def __str__(self) -> str:
        return self.args[1]


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
      what: start of the message, before "must be": the argument in backticks, and what it counts.
      value: value of the argument.
      least: smallest allowed value; None for no limit.
    """
    number = as_int(value, least)
    if number is None:
        rule = "an int" if least is None else f"an int >= {least}"
        argument = what.split("`")[1]
        raise ArgumentError(argument, f"{what} must be {rule}, got {value!r}.")
    return number


def as_number(value: Any) -> float | None:
    """Return a finite real number as a float; None for anything else, a bool too.

    Scalars of NumPy, and of jax where their values are known, are numbers.
    """
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    if is_bool or isinstance(value, str) or np.ndim(value) or np.iscomplexobj(value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # also a traced value
        return None
    return number if math.isfinite(number) else None


def checked_share(owner: str, argument: str, value: Any) -> float:
    """Return a share in (0, 1]; raise `ValueError` for another value."""
    number = as_number(value)
    if number is None or not 0 < number <= 1:
        raise ArgumentError(
            argument, f"{owner}: `{argument}` must be a number in (0, 1], got {value!r}."
        )
    return number


def checks_flags(owner: str) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Let a public function refuse, by name, all but True and False for arguments that are bools.

    These are the keyword arguments that it annotates with `bool` or `bool | None`. Else "no" would
    be True, and 1 would not be `is True`. `owner` is the function's public name, for messages.
    """

    def decorate(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        arguments = inspect.signature(function).parameters.values()
        flags = {x.name: x.annotation for x in arguments if x.annotation in (bool, bool | None)}

        @functools.wraps(function)
        def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            for name in [name for name in flags if name in kwargs]:
                value, takes_none = kwargs[name], flags[name] is not bool
                if isinstance(value, np.bool_):
                    kwargs[name] = bool(value)
                elif not isinstance(value, bool) and not (takes_none and value is None):
                    rule = "True, False or None" if takes_none else "True or False"
                    raise ArgumentError(name, f"{owner}: `{name}` must be {rule}, got {value!r}.")
            return function(*args, **kwargs)

        return wrapper

    return decorate


def check_choice(argument: str, value: Any, kind: Any, owner: str = "") -> None:
    """Raise `ValueError` unless `value` is one of the names in `kind`, a `Literal` of strings.

    `owner` is the public name at the start of the message; "" omits it.
    """
    if not isinstance(value, str) or value not in get_args(kind):
        *others, last = (f'"{name}"' for name in get_args(kind))
        rule = f"`{argument}` must be {', '.join(others)} or {last}, got {value!r}."
        raise ArgumentError(argument, f"{owner}: {rule}" if owner else rule)


def check_names(what: str, names: Iterable[Any], known: Collection[Any], kind: str) -> None:
    """Raise `ValueError` for names that are not among the known ones.

    Args:
      what: start of the message: the public name and the argument that gives the names.
      names: names in the argument.
      known: names that it may give.
      kind: what these are, in the plural, such as "leaves".
    """
    if unknown := [name for name in names if name not in known]:
        wrong, right = (", ".join(map(repr, x)) or "none" for x in (unknown, known))
        raise ValueError(f"{what} names {wrong}, but the {kind} are {right}.")


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the innermost line outside jaxslowmo, jax, optax and the like."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package_of(frame.f_globals) in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_once() -> Callable[[str], None]:
    """Return a function that issues each message as a `UserWarning`, only the first time."""
    seen: set[str] = set()

    def warn(message: str) -> None:
        if message not in seen:
            seen.add(message)
            warn_user(message)

    return warn


def _package_of(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]


class Settings(NamedTuple):
    """A factory of this package, and the arguments of a call of it.

    Attributes:
      factory: its public name.
      arguments: value by name, defaults included.
      given: the names of those that the call gave.
    """

    factory: str
    arguments: Mapping[str, Any]
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the call, without defaults."""
        given = [f"{name}={self.arguments[name]!r}" for name in self.given]
        return f"js.{self.factory}({', '.join(given)})"


def records_settings(factory: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let what the decorated factory returns hold its `Settings`; see `checks_flags`, too.

    An argument that the factory does not have is refused by an error that names those that it has.
    """
    signature = inspect.signature(factory)
    checked = checks_flags(factory.__name__)(factory)

    @functools.wraps(factory)
    def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        for name in kwargs:
            if name not in signature.parameters:
                known = ", ".join(f"`{each}`" for each in signature.parameters)
                raise TypeError(f"{factory.__name__}: there is no argument `{name}`, but {known}.")
        made = checked(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = tuple(bound.arguments)
        bound.apply_defaults()
        transform: Any = made
        transform.settings = Settings(factory.__name__, bound.arguments, given)
        return made

    return wrapper


def settings_of(made: Any) -> Settings | None:
    """Return the settings of what a factory has made; None for anything else."""
    found = getattr(made, "settings", None)
    return found if isinstance(found, Settings) else None
