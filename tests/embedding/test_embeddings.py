"""Lookups and updates are those of whole tables on one device, however they are shared."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from embedding.shared import (
    POOLINGS,
    RATE,
    SHARDS,
    batch_of,
    embeddings_of_all_kinds,
    loss_of,
    tables_of,
    update_of,
)
from support.exhaustive import sweep

SIZES = (1, 2, 4, 8)


def dense_update(emb, tables, bags):
    """New tables by a dense gradient, and Adagrad with a mean of squares per row in NumPy."""
    grads = jax.jit(jax.grad(lambda t: loss_of(emb.reference(emb.write(t), bags))))(tables)
    new = {}
    for name, table in tables.items():
        grad = np.asarray(grads[name], np.float32)
        mean_squares = np.mean(grad * grad, axis=1, keepdims=True)
        new[name] = table - RATE / (np.sqrt(mean_squares) + 1e-8) * grad
    return new


def bags_for(emb, seed=0):
    if set(emb.tables) == {"user", "item", "word"}:
        return jax.tree.map(jnp.asarray, batch_of(seed))
    random = np.random.RandomState(seed)
    tables = emb.tables.items()
    return {n: jnp.asarray(random.randint(-1, t.num_rows, (16, 3))) for n, t in tables}


def check(emb, num_shards, *, check_vma=True, update=None, reference=None):
    emb, bags = emb.over(num_shards), bags_for(emb)
    stored = _stored(emb)
    update = update or update_of(emb, num_shards, check_vma=check_vma)
    found = update(stored, emb.init_optimizer(stored), bags)
    reference = (reference or jax.jit(emb.reference))(stored, bags)
    assert set(found.embedded) == set(reference)
    for feature, want in reference.items():
        np.testing.assert_array_equal(found.embedded[feature], want)
        assert found.embedded[feature].dtype == want.dtype
    tables = emb.read(stored)
    wanted, moved = dense_update(emb, tables, bags), emb.read(found.tables)
    for name, want in wanted.items():
        np.testing.assert_allclose(moved[name], want, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
def test_all_kinds_in_one_program_are_tables_of_one_device_without_an_axis():
    check(embeddings_of_all_kinds(axis_name=None), 1)


def test_all_kinds_in_one_program_are_tables_of_one_device(four):
    emb, update, reference = four
    check(emb, 4, update=update, reference=reference)


@pytest.fixture(scope="module")
def four():
    """All kinds on four devices: the tables, and programs for updates and for one device."""
    emb = embeddings_of_all_kinds().over(4)
    return emb, update_of(emb, 4), jax.jit(emb.reference)


@given(st.data())
def test_any_ids_give_the_vectors_of_one_device(four, data):
    emb, update, reference = four
    stored = _stored(emb)
    bags = {}
    for name, table in emb.tables.items():
        few = st.integers(-2, 3) if data.draw(st.booleans()) else st.integers(-2, table.num_rows)
        rows = st.lists(few, min_size=48, max_size=48)
        bags[name] = jnp.asarray(data.draw(rows), jnp.int32).reshape(16, 3)
    found = update(stored, emb.init_optimizer(stored), bags)
    for feature, want in reference(stored, bags).items():
        np.testing.assert_array_equal(found.embedded[feature], want)
    for name, ids in bags.items():
        parts = np.split(np.asarray(ids), 4)
        real = [set(part[(part >= 0) & (part < emb.tables[name].num_rows)]) for part in parts]
        asked = found.metrics[f"embeddings/{name}/asked"]
        np.testing.assert_array_equal(asked, [len(r) for r in real])
        invalid = found.metrics[f"embeddings/{name}/invalid"]
        np.testing.assert_array_equal(
            invalid, [(p >= emb.tables[name].num_rows).sum() for p in parts]
        )


@functools.cache
def _stored(emb):
    return jax.jit(emb.init)(jax.random.key(0))


CASES = sweep(
    itertools.product(SHARDS, POOLINGS, SIZES, (True, False)),
    lambda *case: case == ("row", "sum", 2, False),
)


@pytest.mark.parametrize(("shard", "pooling", "num_shards", "check_vma"), CASES)
def test_lookup_and_update_are_those_of_one_device(shard, pooling, num_shards, check_vma):
    tables = tables_of(shard, pooling)
    emb = js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_adagrad(RATE))
    check(emb, num_shards, check_vma=check_vma)
