"""Layers in a row that are alike, so that one loop computes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Shorter rows are written out: a loop keeps the compiler from joining what stands in it with what
# stands beside it.
_SHORTEST = 4


class Run(NamedTuple):
    """Layers of the model, one after the other, that a stage computes alike.

    Attributes:
      start: the first layer.
      count: the number of layers; 1 for a layer that stands alone.
    """

    start: int
    count: int


def runs_of(layers: Sequence[Any], kinds: Sequence[Any], start: int, end: int) -> tuple[Run, ...]:
    """Return layers `start` to `end`, without `end`, in runs.

    Args:
      layers: functions of the whole model.
      kinds: for each of them what tells its parameters: structure, paths, shapes, dtypes, specs.
      start: the first layer.
      end: behind the last layer.
    """
    found: list[Run] = []
    at = start
    while at < end:
        count = 1
        while at + count < end and _alike(layers, kinds, at, at + count):
            count += 1
        whole = count >= _SHORTEST
        found += [Run(at, count)] if whole else [Run(i, 1) for i in range(at, at + count)]
        at += count
    return tuple(found)


def _alike(layers: Sequence[Any], kinds: Sequence[Any], one: int, other: int) -> bool:
    return kinds[one] == kinds[other] and equal_layers(layers[one], layers[other])


def equal_layers(one: Any, other: Any) -> bool:
    """Whether two layers are the same function."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # objects of others may compare as arrays do
        return False
