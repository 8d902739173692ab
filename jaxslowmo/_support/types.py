"""Type aliases shared by every package, and types of varying axes, which `shard_map` may track."""

from typing import Any

import jax
from jax import core, lax

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


def varying_axes(x: Any) -> frozenset[str]:
    """Return the axes that the type of `x` says it varies over; empty where jax tracks none.

    `x` is an array, or a type of one.
    """
    is_type = isinstance(x, jax.ShapeDtypeStruct | core.ShapedArray)
    aval = x if is_type else jax.typeof(x)
    tracked = aval.manual_axis_type
    return frozenset() if tracked is None else tracked.varying


def checks_varying(name: str) -> bool:
    """Return whether jax tracks, at this point of the trace, which values vary over axis `name`."""
    return name in varying_axes(lax.axis_index(name))


def tracks_types() -> bool:
    """Return whether values have types of varying axes here: in `shard_map` that checks them.

    A map inside of another passes it on as its `check_vma`: else its results would have types of
    the outer axes where the other values have none.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and checks_varying(manual[0])
