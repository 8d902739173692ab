"""Types for argparse: a bad value ends in an error message of the parser."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from ..runtime import MAX_CPU_DEVICES


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    return _checked(text, int, lambda value: value >= 1, "a whole number >= 1")


def natural(text: str) -> int:
    """A whole number >= 0."""
    return _checked(text, int, lambda value: value >= 0, "a whole number >= 0")


def positive_float(text: str) -> float:
    """A finite number > 0."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "a number > 0")


def cpu_devices(text: str) -> int:
    """A number of CPU devices that a process can have."""
    rule = f"a whole number from 1 to {MAX_CPU_DEVICES}"
    return _checked(text, int, lambda value: 1 <= value <= MAX_CPU_DEVICES, rule)


def _checked(
    text: str, kind: Callable[[str], Any], allowed: Callable[[Any], bool], rule: str
) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value
