"""Rows of a buffer for values that live for a while: as few as live at once."""

import heapq
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Lifetime(NamedTuple):
    """From when on a value is kept until when it is last read, both included."""

    start: int
    end: int


def rows_of(lifetimes: Mapping[Key, Lifetime]) -> tuple[dict[Key, int], int]:
    """A row for every value, so that no two that live at the same time share one.

    Returns:
      The rows, and how many there are: the most values that live at once.
    """
    rows: dict[Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, which row
    count = 0
    for key, life in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < life.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        rows[key] = row
        heapq.heappush(busy, (life.end, row))
    return rows, count
