"""Checks of arguments, with their error messages."""

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


def as_batch_size(batch_size_per_device: Any, batch_size: Any) -> int:
    """Return the batch size from its two argument names; the default is 1."""
    spellings = {"batch_size_per_device": batch_size_per_device, "batch_size": batch_size}
    sizes = {name: as_count(name, value) for name, value in spellings.items() if value is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "`batch_size` must not differ from `batch_size_per_device`, its other name, got "
            f"{batch_size} and {batch_size_per_device}."
        )
    return next(iter(sizes.values()), 1)


def as_seconds(name: str, value: Any) -> float | None:
    """Return `value`, a positive number of seconds or None."""
    if value is not None and not (is_finite(value) and value > 0):
        raise ValueError(f"`{name}` must be a number of seconds > 0, or None, got {value!r}.")
    return value
