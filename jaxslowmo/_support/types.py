"""Type aliases shared by every package, and the names in an `AxisName`."""

from typing import Any

PyTree = Any
"""A tree of arrays (nested dicts, tuples, NamedTuples, nnx states, ...)."""

AxisName = str | tuple[str, ...]
"""The name of a mapped axis, or under `shard_map` of several that act as one."""

Phase = tuple[str, ...]
"""The exchanges of one update, as names of events in order; `()` is a local update."""

CompilerOptions = tuple[tuple[str, str | int | float | bool], ...]
"""Names and values of options for the compiler of a program."""


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Return `axis_name` as a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)
