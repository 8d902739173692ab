"""Type aliases shared by every package."""

from typing import Any

PyTree = Any
"""A tree of arrays (nested dicts, tuples, NamedTuples, nnx states, ...)."""

AxisName = str | tuple[str, ...]
"""A mapped axis, or under `shard_map` several taken together."""

Phase = tuple[str, ...]
"""What one update exchanges: names of events in order; `()` is a local update."""
