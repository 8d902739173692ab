"""Whether an argument that is a function can be called as it will be."""

import inspect
from typing import Any


def takes(value: Any, *arguments: str) -> bool:
    """Whether `value` can be called with so many arguments by position, as far as is known."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions do not tell
        pass
    return True


def described(value: Any) -> str:
    """For messages: a function with what it takes, anything else as it is."""
    try:
        return f"{value.__name__}, which takes ({parameters(value)})"
    except (AttributeError, TypeError, ValueError):
        return repr(value)


def parameters(function: Any) -> str:
    """Names of a function's parameters, separated by commas."""
    return ", ".join(inspect.signature(function).parameters)
