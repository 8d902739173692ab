"""Unions and intersections of half-open intervals of time."""

from collections.abc import Iterable

Interval = tuple[int, int]  # start and end, in nanoseconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals in order, those that touch joined."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """How long at least one of the intervals lasts."""
    return sum(end - start for start, end in union(intervals))


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The instants that belong to an interval of both, as `union` gives them."""
    one, other = union(first), union(second)
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found
