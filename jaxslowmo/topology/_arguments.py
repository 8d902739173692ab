"""Checks and conversions of arguments: numbers of nodes, tables of peers, functions."""

import inspect
import operator
from typing import Any


def as_size(argument: str, value: object, least: int = 1) -> int:
    """Return `value` as an int; raise `ValueError` unless it is an integer >= `least`."""
    size = _plain(value)
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"`{argument}` must be an int >= {least}, got {value!r}.")
    return size


def as_rows(argument: str, table: Any) -> tuple[tuple[Any, ...], ...]:
    """Return `table` as tuples of ints; entries of other types stay, for a later check to name."""
    try:
        return tuple(tuple(map(_plain, row)) for row in table)
    except TypeError:
        raise ValueError(
            f"`{argument}` must hold one sequence of peers per node, got {table!r}."
        ) from None


def _plain(entry: Any) -> Any:
    if isinstance(entry, bool):
        return entry
    try:
        return operator.index(entry)
    except TypeError:
        return entry


def check_even(name: str, num_nodes: int) -> None:
    """Raise `ValueError` for an odd number of nodes above 1."""
    if num_nodes % 2 and num_nodes > 1:
        raise ValueError(
            f"{name}: `num_nodes` must be even, since nodes exchange in pairs of an even and an "
            f"odd one and one would be left over; got {num_nodes}."
        )


def accepts(value: Any, *arguments: str) -> bool:
    """Return whether `value` can be called with these positional arguments, as far as is known."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True


def describe_value(value: Any) -> str:
    """Return text for messages: a function with its parameters, or the `repr` of other values."""
    try:
        return f"{value.__name__}, which takes ({parameters(value)})"
    except (AttributeError, TypeError, ValueError):
        return repr(value)


def parameters(function: Any) -> str:
    """Return the names of a function's parameters, separated by commas."""
    return ", ".join(inspect.signature(function).parameters)
