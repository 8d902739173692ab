"""Bucket assignment equals torch's on every recorded case."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

CASES = json.loads((Path(__file__).parents[1] / "golden" / "buckets.json").read_text())["cases"]


def leaf(tensor: dict) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor["shape"]), jnp.dtype(tensor["dtype"]))


def test_all_cases_are_here():
    assert len(CASES) == 154
    assert any(case["unordered_tail"] for case in CASES)
    assert any(case["tensor_indices"] for case in CASES)
    assert any(any(case["expect_sparse"]) for case in CASES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equal_to_torch(number):
    case = CASES[number]
    # float64 and int64 leaves keep their size here: nothing becomes a jax array.
    buckets, limits = js.assign_buckets(
        [leaf(t) for t in case["tensors"]],
        case["limits"],
        expect_sparse=case["expect_sparse"] or None,
        indices=case["tensor_indices"] or None,
    )
    ours = list(zip(map(tuple, buckets), limits, strict=True))
    torch = list(zip(map(tuple, case["buckets"]), case["bucket_limits"], strict=True))
    ordered = len(torch) - case["unordered_tail"]
    assert ours[:ordered] == torch[:ordered]
    assert sorted(ours[ordered:]) == sorted(torch[ordered:])


def test_a_limit_of_zero_closes_after_every_leaf():
    leaves = [np.zeros(3, np.float32), np.zeros(0, np.float32), np.zeros((), np.float16)]
    assert js.assign_buckets(leaves, (0,)) == ([[0], [1], [2]], [0, 0, 0])


def test_no_leaves_no_buckets():
    assert js.assign_buckets([]) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limits": ()}, r"`limits` must hold at least one size in bytes, got none"),
        ({"limits": (4, -1)}, r"`limits` .* >= 0, got \[4, -1\]"),
        ({"indices": [0]}, r"`indices` must name every leaf: got 1 for 2 leaves"),
        ({"expect_sparse": [True]}, r"`expect_sparse` .* cover label 1, got 1 flags"),
        ({"indices": [3, 7], "expect_sparse": [False] * 5}, r"cover label 7, got 5 flags"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        js.assign_buckets([np.zeros(2, np.float32)] * 2, **arguments)
