"""Arguments that count something: Python's integers, NumPy's, and whatever stands for one."""

import operator
from typing import Any


def as_int(value: Any, least: int | None = None) -> int | None:
    """Return `value` as an int; None if it is no integer, or is a bool, or is below `least`."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if least is not None and number < least else number
