"""Flat buffers: packing and unpacking is the identity."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import at_least_float32, check_floating, leaf_names, plan_buffers, tree_bytes


class Layer(NamedTuple):
    kernel: Any
    bias: Any


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
arrays = st.builds(
    lambda shape, dtype, seed: (
        np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))
    ),
    shapes,
    dtypes,
    st.integers(0, 99),
)
trees = st.recursive(
    arrays | st.just({}) | st.just(None),
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(a, b))


@given(
    trees,
    st.sampled_from([None, (0,), (1, 20), (64,)]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_unpacking_what_was_packed_is_the_identity(tree, limits, split, random):
    order = list(range(len(jax.tree.leaves(tree))))
    random.shuffle(order)
    plan = plan_buffers(tree, limits=limits, order=order, split_large=split)
    with jax.disable_jit():
        packed = plan.pack(tree)
        restored = plan.unpack(packed)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        assert same(before, after)
    for buffer, flat in zip(plan.buffers, packed, strict=True):
        assert flat.shape == (buffer.num_elements,)
        assert flat.dtype == buffer.dtype


@given(trees, st.sampled_from([None, (0,), (1, 20)]))
def test_every_leaf_is_in_one_buffer(tree, limits):
    leaves = jax.tree.leaves(tree)
    plan = plan_buffers(tree, limits=limits)
    assert sorted(i for b in plan.buffers for i in b.leaves) == list(range(len(leaves)))
    assert all(leaves[i].dtype == b.dtype for b in plan.buffers for i in b.leaves)
    if limits is None:
        assert len(plan.buffers) == len({leaf.dtype for leaf in leaves})
    if limits == (0,):
        assert len(plan.buffers) == len(leaves)


@given(trees)
def test_exchange_buffers_are_float32_and_padding_is_dropped(tree):
    plan = plan_buffers(tree, dtype_of=at_least_float32)
    assert len(plan.buffers) == min(1, len(jax.tree.leaves(tree)))
    padded = [jnp.pad(flat, (0, 5)) for flat in plan.pack(tree)]
    restored = plan.unpack(padded)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        assert after.dtype == jnp.float32
        assert same(np.asarray(before, np.float32), after)


def test_the_order_is_the_callers():
    tree = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32), "c": np.ones(1, np.float32)}
    assert [b.leaves for b in plan_buffers(tree, order=(2, 1, 0)).buffers] == [(2, 1, 0)]
    assert [b.leaves for b in plan_buffers(tree, limits=(4, 20), order=(2, 1, 0)).buffers] == [
        (2,),
        (1, 0),
    ]


def test_float64_keeps_its_own_exchange_buffer():
    tree = {"a": np.zeros(2, np.float64), "b": np.zeros(3, np.float16)}
    found = {
        b.dtype.name: b.num_elements for b in plan_buffers(tree, dtype_of=at_least_float32).buffers
    }
    assert found == {"float64": 2, "float32": 3}


def test_names_and_bytes():
    tree = {"dense": Layer(np.zeros((2, 3), np.float32), np.zeros(3, np.float16)), "none": None}
    assert leaf_names(tree) == ["dense/kernel", "dense/bias"]
    assert leaf_names(np.zeros(1)) == ["(root)"]
    assert tree_bytes(tree) == 2 * 3 * 4 + 3 * 2
    assert tree_bytes({"zero": np.zeros((0, 5)), "scalar": np.zeros((), np.float32)}) == 4
    assert math.prod(()) == 1


def test_check_floating_names_every_other_leaf():
    tree = {
        "ok": np.zeros(1, np.float16),
        "layer": {"steps": np.zeros(1, np.int32), "mask": np.zeros(1, bool)},
        "phase": np.zeros(1, np.complex64),
        "key": jax.random.key(0),
    }
    with pytest.raises(ValueError, match=r"optax\.masked") as error:
        check_floating("owner", tree)
    for part in (
        "owner ",
        "layer/steps (int32)",
        "layer/mask (bool)",
        "phase (complex64)",
        "key (",
    ):
        assert part in str(error.value)
    assert "ok" not in str(error.value)
