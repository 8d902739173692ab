"""Values that hold for what is called inside of a `with`."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: _T) -> Iterator[_T]:
    """Set a context variable to a value, which is yielded, and back at the end."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
