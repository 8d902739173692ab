"""Bags from lists, and what is a bag of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5)


@given(ROWS, st.integers(1, 4), st.booleans())
def test_lists_lengths_and_offsets_are_the_same_bags(rows, room, weighted):
    """Cut to the length that there is room for; weights go with their ids."""
    lengths = [len(row) for row in rows]
    weights = [[1.0 + i for i in range(len(row))] for row in rows] if weighted else None
    flat = np.array([i for row in rows for i in row], np.int64)
    flat_weights = None if weights is None else [x for row in weights for x in row]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    want = np.full((len(rows), room), -1)
    want_weights = np.zeros((len(rows), room))
    for i, row in enumerate(rows):
        for j, number in enumerate(row[:room]):
            want[i, j], want_weights[i, j] = number, 1 + j
    options = {"max_length": room, "truncate": True}
    by_length = {"lengths": np.array(lengths, np.int32), "weights": flat_weights}
    for found in (
        js.embedding.bags(rows, weights=weights, **options),
        js.embedding.bags(flat, **by_length, **options),
        js.embedding.bags(flat, offsets=offsets, weights=flat_weights, **options),
    ):
        np.testing.assert_array_equal(found.ids, want)
        assert found.ids.dtype == np.int32
        if weighted:
            np.testing.assert_array_equal(found.weights, want_weights)
            assert found.weights.dtype == np.float32
        else:
            assert found.weights is None


# The example of torchrec's documentation of KeyedJaggedTensor: two features of three examples.
VALUES = [0, 1, 2, 3, 4, 5, 6, 7]
LENGTHS, OFFSETS = [2, 0, 1, 1, 1, 3], [0, 2, 2, 3, 4, 5, 8]
USERS, ITEMS = [[0, 1], [-1, -1], [2, -1]], [[3, -1, -1], [4, -1, -1], [5, 6, 7]]


def test_a_keyed_jagged_tensor_is_bags_by_feature():
    """Of one flat array of ids, ordered by feature and then by example."""
    weights = np.arange(8) / 4
    for form in ({"lengths": LENGTHS}, {"offsets": OFFSETS}):
        found = js.embedding.jagged(VALUES, features=["user", "item"], weights=weights, **form)
        assert list(found) == ["user", "item"]
        assert (found["user"].ids.tolist(), found["item"].ids.tolist()) == (USERS, ITEMS)
        assert found["user"].weights.tolist() == [[0, 0.25], [0, 0], [0.5, 0]]
        assert found["item"].weights[2].tolist() == [1.25, 1.5, 1.75]


def test_a_length_is_of_all_features_or_of_those_that_are_named():
    def shapes(**options):
        found = js.embedding.jagged(VALUES, features=["a", "b"], lengths=LENGTHS, **options)
        return [found[name].ids.shape for name in "ab"]

    assert shapes(max_length=4) == [(3, 4), (3, 4)]
    assert shapes(max_length={"b": 1}, truncate=True) == [(3, 2), (3, 1)]
    with pytest.raises(ValueError, match=r"`max_length` names 'c', but the features are 'a', 'b'"):
        shapes(max_length={"a": 2, "c": 5})
