"""Flat buffers: packing and unpacking is the identity."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.tree import (
    at_least_float32,
    leaf_names,
    note_buffers,
    noted_buffers,
    plan_buffers,
    tree_bytes,
)


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
    leaves = jax.tree.leaves(tree)
    order = list(range(len(leaves)))
    random.shuffle(order)
    plan = plan_buffers(tree, limits=limits, order=order, split_large=split)
    with jax.disable_jit():
        packed = plan.pack(tree)
        restored = plan.unpack(packed)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert all(map(same, leaves, jax.tree.leaves(restored)))
    for buffer, flat in zip(plan.buffers, packed, strict=True):
        assert flat.shape == (buffer.num_elements,)
        assert flat.dtype == buffer.dtype
        assert buffer.size_bytes == flat.nbytes
    whole = [i for buffer in plan.buffers for i in buffer.leaves]
    if limits is None:
        assert len(plan.buffers) == len({leaf.dtype for leaf in leaves})
        assert all([i for i in order if i in b.leaves] == [*b.leaves] for b in plan.buffers)
    if limits == (0,):
        assert whole == order


def sent(tree):
    """The types of leaves in the dtypes of an exchange."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, at_least_float32(x.dtype)), tree)


@given(trees)
def test_exchange_buffers_are_float32_and_padding_is_dropped(tree):
    leaves = jax.tree.leaves(tree)
    plan = plan_buffers(sent(leaves))
    assert len(plan.buffers) == min(1, len(leaves))
    restored = plan.unpack([jnp.pad(flat, (0, 5)) for flat in plan.pack(leaves)])
    for before, after in zip(leaves, restored, strict=True):
        assert same(np.asarray(before, np.float32), after)


def test_buckets_may_be_given_and_float64_keeps_a_buffer_of_its_own():
    sizes = {"a": (2, np.float64), "b": (3, np.float16), "c": (1, np.float64)}
    tree = {name: np.zeros(*size) for name, size in sizes.items()}
    for options in ({"buckets": [[2, 0], [1]]}, {"order": (2, 1, 0)}):
        plan = plan_buffers(sent(tree), **options)
        found = [(b.dtype.name, b.num_elements, b.leaves) for b in plan.buffers]
        assert found == [("float64", 3, (2, 0)), ("float32", 3, (1,))]


def test_programs_note_their_buffers_once():
    tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)}
    plan = plan_buffers(tree)
    note_buffers("average", plan.buffers, ["a", "b"])  # nobody listens
    with noted_buffers() as notes:
        for _ in range(2):
            note_buffers("average", plan.buffers, ["a", "b"])
        note_buffers("slow", plan.buffers, ["a", "b"])
        assert notes == []
    found = [(n.exchange, n.dtype, n.size_bytes, n.leaves) for n in notes]
    both = [("float32", 24, ("a",)), ("bfloat16", 8, ("b",))]
    assert found == [(role, *rest) for role in ("average", "slow") for rest in both]


def test_names_and_bytes():
    tree = {"dense": Layer(np.zeros((2, 3), np.float32), np.zeros(3, np.float16)), "none": None}
    assert leaf_names(tree) == ["dense/kernel", "dense/bias"]
    assert leaf_names(np.zeros(1)) == ["(root)"]
    assert tree_bytes(tree) == 2 * 3 * 4 + 3 * 2
    assert tree_bytes({"zero": np.zeros((0, 5)), "scalar": np.zeros((), np.float32)}) == 4
