"""Unions and intersections of intervals against sets of instants."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.statistics._intervals import intersection, length, union

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def instants(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_they_hold_the_same_instants_as_sets_do(first, second):
    for found, expected in (
        (union(first), instants(first)),
        (intersection(first, second), instants(first) & instants(second)),
    ):
        assert instants(found) == expected
        # Disjoint, not even touching, and in order.
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
        assert all(start < end for start, end in found)
    assert length(first) == len(instants(first))
    assert length(intersection(first, second)) <= min(length(first), length(second))
