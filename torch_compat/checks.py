"""Checks of numbers among arguments, with their error messages."""

import math
import operator
from typing import Any


def as_int(name: str, value: Any) -> int:
    """Return `value` as an int; NumPy's ints are valid, bools are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` must be an int, got {value!r}.") from None


def as_count(name: str, value: Any) -> int:
    """Return `value` as an int of at least 1."""
    count = as_int(name, value)
    if count < 1:
        raise ValueError(f"`{name}` must be >= 1, got {count}.")
    return count


def is_finite(value: Any) -> bool:
    """Return whether `value` is an int or a float, and finite; bools are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
