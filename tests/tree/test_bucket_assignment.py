"""Bucket assignment equals torch's on every recorded case."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js

CASES = json.loads((Path(__file__).parents[1] / "golden" / "buckets.json").read_text())["cases"]


def leaf(tensor: dict) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor["shape"]), jnp.dtype(tensor["dtype"]))


def test_equal_to_torch():
    """On every recorded case; the last ones of a list may stand in any order there."""
    assert len(CASES) == 154
    assert any(case["unordered_tail"] for case in CASES)
    for number, case in enumerate(CASES):
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
        assert ours[:ordered] == torch[:ordered], number
        assert sorted(ours[ordered:]) == sorted(torch[ordered:]), number


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
    # The largest of those that were joined.
    assert reported == [max(limit_of[i] for i in bucket if i in limit_of) for bucket in buckets]


def test_large_leaves_alone():
    leaves = [np.zeros(n, np.float32) for n in (10, 1000, 10, 10)]
    assert js.assign_buckets(leaves, (60, 4000)) == ([[0, 1], [2, 3]], [60, 4000])
    for alone_bytes in (4000, 41):
        assert js.assign_buckets(leaves, (60, 4000), alone_bytes=alone_bytes) == (
            [[0, 2], [1], [3]],
            [60, alone_bytes, 4000],
        )
    assert js.assign_buckets(leaves, (60, 4000), alone_bytes=4001)[0] == [[0, 1], [2, 3]]
