"""What ColossalAI's rule gives beside the recorded cases (test_uniform.py), and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js


@given(st.lists(st.integers(0, 30), min_size=7, max_size=14), st.integers(1, 3), st.integers(1, 2))
def test_blocks_follow_each_other_and_none_is_empty(weights, num_stages, num_chunks):
    parts = js.partition_balanced(weights, num_stages, num_chunks)
    assert [len(blocks) for blocks in parts] == [num_chunks] * num_stages
    in_order = [parts[k % num_stages][k // num_stages] for k in range(num_stages * num_chunks)]
    ends = [end for _, end in in_order]
    assert [start for start, _ in in_order] == [0, *ends[:-1]]
    assert ends[-1] == len(weights)
    assert all(start < end for start, end in in_order)


def test_any_integers_are_weights():
    wanted = js.partition_balanced([5, 1, 1, 1, 4], 2)
    assert wanted == [[(0, 2)], [(2, 5)]]
    assert js.partition_balanced(np.array([5, 1, 1, 1, 4], np.uint8), 2) == wanted
    assert js.partition_balanced((w for w in [5, 1, 1, 1, 4]), 2) == wanted
    # Sums of these overflow NumPy's integers.
    huge = [w * 2**60 for w in [5, 1, 1, 1, 4]]
    assert js.partition_balanced(huge, 2) == wanted


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([3, -1, 2, -4], "must be finite and >= 0, got -1 for layer 1, -4 for layer 3"),
        ([1.5, 2.0, 1.0], "must be integers, got float64 numbers: js.partition_by_cost takes any"),
        ([], r"must hold one number per layer, got \[\]"),
        (["a"], r"must hold one number per layer, got \['a'\]"),
        ([[1], [2]], "must hold one number per layer"),
        ([[1], [2, 3]], "must hold one number per layer"),
        (5, "must hold one number per layer, got 5"),
    ],
)
def test_what_is_no_weight(weights, message):
    with pytest.raises(ValueError, match=f"partition_balanced: `weights` {message}"):
        js.partition_balanced(weights, 2)
