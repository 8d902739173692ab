"""Bucket assignment equals torch's on every recorded case."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ({"max_buckets": 0}, r"`max_buckets` must be an int >= 1, got 0"),
        ({"indices": [3, 7], "expect_sparse": [False] * 5}, r"cover label 7, got 5 flags"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        js.assign_buckets([np.zeros(2, np.float32)] * 2, **arguments)


leaf_lists = st.lists(
    st.tuples(st.integers(0, 9000), st.sampled_from(["float32", "bfloat16"])), max_size=8
)
limit_lists = st.lists(st.integers(0, 20000), min_size=1, max_size=3)


def leaves_of(found):
    return [jax.ShapeDtypeStruct((n,), jnp.dtype(dtype)) for n, dtype in found]


@given(leaf_lists, limit_lists)
def test_splits_cover_every_leaf_once(found, limits):
    leaves = leaves_of(found)
    whole, _ = js.assign_buckets(leaves, limits)
    split, reported = js.assign_buckets(leaves, limits, split_large=True)
    ends = [0] * len(leaves)
    for bucket, limit in zip(split, reported, strict=True):
        assert len({leaves[piece.label].dtype for piece in bucket}) == 1
        size = sum((p.stop - p.start) * leaves[p.label].dtype.itemsize for p in bucket)
        # At most one cut beyond the limit, or a leaf that is not larger than it.
        assert limit == 0 or size < 2 * limit + 1024 * 4
        for piece in bucket:
            assert piece.start == ends[piece.label]
            ends[piece.label] = piece.stop
    assert ends == [n for n, _ in found]
    if all(leaf.size * leaf.dtype.itemsize <= min(limits) for leaf in leaves):
        assert [[p.label for p in bucket] for bucket in split] == whole


def test_a_huge_leaf_fills_its_buckets():
    leaves = [np.zeros(100, np.float32), np.zeros(5000, np.float32), np.zeros(10, np.float32)]
    buckets, limits = js.assign_buckets(leaves, (4096, 8192), split_large=True)
    assert limits == [4096, 8192, 8192]
    assert buckets == [
        [(0, 0, 100), (1, 0, 1024)],
        [(1, 1024, 3072)],
        [(1, 3072, 5000), (2, 0, 10)],
    ]


@given(leaf_lists, limit_lists, st.integers(1, 5))
def test_a_maximum_number_of_buckets(found, limits, most):
    leaves = leaves_of(found)
    free, _ = js.assign_buckets(leaves, limits)
    dtypes = len({leaf.dtype for leaf in leaves})
    if dtypes > most:
        with pytest.raises(ValueError, match=rf"`max_buckets` must be at least {dtypes}"):
            js.assign_buckets(leaves, limits, max_buckets=most)
        return
    buckets, reported = js.assign_buckets(leaves, limits, max_buckets=most)
    assert len(buckets) == len(reported) == min(most, len(free))
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(leaves)))
    assert all(len({leaves[i].dtype for i in bucket}) == 1 for bucket in buckets)


def merged_one_by_one(buckets, sizes, kinds, most):
    """What `max_buckets` says, looking at all buckets for each that it joins."""
    joined = [(list(b), s, k) for b, s, k in zip(buckets, sizes, kinds, strict=True)]
    while len(joined) > most:
        pairs = []
        for i, (_, size, kind) in enumerate(joined):
            earlier = [j for j in range(i) if joined[j][2] == kind]
            pairs += [(joined[earlier[-1]][1] + size, earlier[-1], i)] if earlier else []
        size, j, i = min(pairs)  # of those that are equal the first
        joined[j] = (joined[j][0] + joined[i][0], size, joined[j][2])
        del joined[i]
    return [bucket for bucket, _, _ in joined]


@given(
    # Few sizes, so that many are equal, and leaves without elements.
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 4, 7, 100]), st.sampled_from(["float32", "int8"])),
        max_size=40,
    ),
    st.sampled_from([(0,), (8,), (0, 64)]),
    st.integers(2, 20),
    st.sets(st.integers(0, 39), max_size=2),
)
def test_joined_as_if_all_were_looked_at_each_time(found, limits, most, sparse):
    leaves = leaves_of(found)
    flags = [i in sparse for i in range(len(leaves))]
    options = {"expect_sparse": flags or None}
    free, free_limits = js.assign_buckets(leaves, limits, **options)
    sizes = [sum(leaves[i].size * leaves[i].dtype.itemsize for i in bucket) for bucket in free]
    kinds = [b[0] if flags[b[0]] else leaves[b[0]].dtype.name for b in free]
    most = max(most, len(set(kinds)))
    buckets, reported = js.assign_buckets(leaves, limits, max_buckets=most, **options)
    assert buckets == merged_one_by_one(free, sizes, kinds, most)
    limit_of = {bucket[0]: limit for bucket, limit in zip(free, free_limits, strict=True)}
    assert reported == [
        max(limit_of[i] for i in bucket if i in limit_of) for bucket in buckets
    ]  # the largest of those that were joined


def lines_run(function):
    """How many lines of the module that plans buckets run in a call: its work, on any machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if Path(frame.f_code.co_filename).name == "_bucket_assignment.py" else None

    others = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(others)
    return count


@pytest.mark.parametrize("max_buckets", [None, 4])
def test_four_times_the_leaves_are_about_four_times_the_work(max_buckets):
    def work(count):
        rng = np.random.default_rng(0)
        leaves = leaves_of((int(n), "float32") for n in rng.integers(0, 9000, count))
        return lines_run(lambda: js.assign_buckets(leaves, (0,), max_buckets=max_buckets))

    few, many = work(100), work(400)
    assert 100 < few < many < 5 * few


def test_the_smallest_neighbours_become_one():
    leaves = [np.zeros(n, np.float32) for n in (100, 10, 10, 100)]
    assert js.assign_buckets(leaves, (0,), max_buckets=3)[0] == [[0], [1, 2], [3]]


def test_sparse_leaves_stay_alone():
    leaves = [np.zeros(4, np.float32)] * 3
    flags = [False, True, False]
    assert js.assign_buckets(leaves, (0,), expect_sparse=flags, max_buckets=2)[0] == [[0, 2], [1]]
    with pytest.raises(ValueError, match="at least 2 here"):
        js.assign_buckets(leaves, (0,), expect_sparse=flags, max_buckets=1)


def test_large_leaves_alone():
    leaves = [np.zeros(n, np.float32) for n in (10, 1000, 10, 10)]
    assert js.assign_buckets(leaves, (60, 4000)) == ([[0, 1], [2, 3]], [60, 4000])
    assert js.assign_buckets(leaves, (60, 4000), alone_bytes=4000) == (
        [[0, 2], [1], [3]],
        [60, 4000, 4000],
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alone_bytes": -1}, "`alone_bytes` .* >= 0, got -1"),
        ({"alone_bytes": 4, "split_large": True}, "`alone_bytes` keeps .* give one"),
    ],
)
def test_bad_sizes_of_leaves_alone(options, said):
    with pytest.raises(ValueError, match=said):
        js.assign_buckets([np.zeros(2, np.float32)], **options)
