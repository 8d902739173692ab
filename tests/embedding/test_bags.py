"""Bags from lists, and what is no bag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.embedding._bags import bags_of

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5)


@given(ROWS)
def test_lists_lengths_and_offsets_are_the_same_bags(rows):
    lengths = [len(row) for row in rows]
    flat = np.array([i for row in rows for i in row], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    want = np.array([row + [-1] * (4 - len(row)) for row in rows], np.int32).reshape(-1, 4)
    for found in (
        js.bags(rows, max_length=4),
        js.bags(flat, lengths=np.array(lengths, np.int32), max_length=4),
        js.bags(flat, offsets=offsets, max_length=4),
    ):
        np.testing.assert_array_equal(found.ids, want)
        assert found.ids.dtype == np.int32
        assert found.weights is None


def test_weights_go_with_their_ids():
    found = js.bags([[4], [], [5, 6]], weights=[[1], [], [2, 3]])
    np.testing.assert_array_equal(found.ids, [[4, -1], [-1, -1], [5, 6]])
    np.testing.assert_array_equal(found.weights, [[1, 0], [0, 0], [2, 3]])
    assert found.weights.dtype == np.float32


def test_what_is_too_long_is_left_out_on_request():
    found = js.bags([[4, 5, 6], [7]], weights=[[1, 2, 3], [4]], max_length=2, truncate=True)
    np.testing.assert_array_equal(found.ids, [[4, 5], [7, -1]])
    np.testing.assert_array_equal(found.weights, [[1, 2], [4, 0]])


def test_ids_beyond_int32_are_kept_for_the_table_to_refuse():
    assert js.bags([[2**40]]).ids.tolist() == [[2**40]]


def test_bags_are_trees():
    assert jax.tree.map(jnp.shape, js.bags([[1, 2]])) == js.Bags((1, 2), None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: js.bags([[1, 2, 3]], max_length=2), r"bag 0 has 3 ids, and `max_length` is 2"),
        (lambda: js.bags([[-1]]), r"ids must not be negative.*-1"),
        (lambda: js.bags([[1.5]]), r"ids must be integers, got float64"),
        (lambda: js.bags([1, 2]), r"`rows` must be a sequence of sequences"),
        (lambda: js.bags([[1]], max_length=0), r"`max_length` must be an int >= 1, got 0"),
        (lambda: js.bags([1], lengths=[1], offsets=[0, 1]), r"not both"),
        (lambda: js.bags([1, 2], lengths=[1]), r"`lengths` must be those of all 2 ids.*up to 1"),
        (lambda: js.bags([1, 2], lengths=[3, -1]), r"not decrease below 0"),
        (lambda: js.bags([1, 2], offsets=[1, 2]), r"`offsets` must begin with 0"),
        (lambda: js.bags([1, 2], offsets=[0, 1.5]), r"`offsets` must be a sequence of integers"),
        (lambda: js.bags([[1], [2, 3]], weights=[[1], [2]]), r"\[1, 2\] ids and \[1, 1\] weights"),
        (lambda: js.bags([1], lengths=[1], weights=[1, 2]), r"one for each of 1 ids, got \(2,\)"),
    ],
)
def test_bad_bags(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "inputs", "message"),
    [
        ({"a": np.zeros(1)}, None, r"feature 'a' must be integers.*float64\[1\]"),
        ({"a": np.zeros((1, 1, 1), int)}, None, r"\(batch, max_length\), got int64\[1, 1, 1\]"),
        ({"a": [1, 2]}, None, r"'a' must be an array of ids or js.Bags.*got list"),
        ({"a": js.Bags(np.zeros(2, int), np.ones(3))}, None, r"weights of feature 'a'.*\(3,\)"),
        ({"a": js.Bags(np.zeros(2, int), np.ones(2, int))}, None, r"must be floating, got int64"),
        ({"b": np.zeros(1, int)}, None, r"none of the features 'a', 'c'"),
        (np.zeros(1, int), None, r"no mapping needs `inputs`.*got ndarray"),
        (0, lambda batch: {"d": np.zeros(1, int)}, r"`inputs` returns 'd'.*'a', 'c'"),
        (0, lambda batch: np.zeros(1, int), r"`inputs` must return ids.*got ndarray"),
    ],
)
def test_what_is_no_bag_of_a_batch(batch, inputs, message):
    with pytest.raises(ValueError, match=message):
        bags_of(batch, ("a", "c"), inputs)


def test_features_may_be_missing_and_inputs_finds_them_anywhere():
    ids = np.zeros(1, int)
    assert set(bags_of({"c": ids, "label": ids}, ("a", "c"), None)) == {"c"}
    found = bags_of((ids, "label"), ("a", "c"), lambda batch: {"a": batch[0]})
    assert found["a"].ids is ids


def test_arrays_of_other_libraries_are_numpys():
    """Such as torch's, whose dtypes numpy does not know."""

    class Tensor:
        dtype = "torch.int64"

        def __array__(self, dtype=None, copy=None):
            return np.array([[3, -1]])

    found = bags_of({"a": Tensor(), "b": js.Bags(Tensor())}, ("a", "b"), None)
    assert [bags.ids.tolist() for bags in found.values()] == [[[3, -1]], [[3, -1]]]
