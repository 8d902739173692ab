"""Tests that lookups and updates equal those of whole tables on one device."""

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


def tables_after_dense_update(emb, tables, bags):
    """Return new tables by dense gradients and, in NumPy, Adagrad with one mean square per row."""
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


def assert_equal_on_one_device(emb, num_shards, *, check_vma=True, update=None, reference=None):
    emb, bags = emb.over(num_shards), bags_for(emb)
    stored = _stored(emb)
    update = update or update_of(emb, num_shards, check_vma=check_vma)
    result = update(stored, emb.init_optimizer(stored), bags)
    reference = (reference or jax.jit(emb.reference))(stored, bags)
    assert set(result.embedded) == set(reference)
    for feature, want in reference.items():
        np.testing.assert_array_equal(result.embedded[feature], want)
        assert result.embedded[feature].dtype == want.dtype
    tables = emb.read(stored)
    wanted, updated = tables_after_dense_update(emb, tables, bags), emb.read(result.tables)
    for name, want in wanted.items():
        np.testing.assert_allclose(updated[name], want, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
def test_all_kinds_without_an_axis_equal_tables_on_one_device():
    assert_equal_on_one_device(embeddings_of_all_kinds(axis_name=None), 1)


def test_all_kinds_on_four_devices_equal_tables_on_one_device(four_devices):
    emb, update, reference = four_devices
    assert_equal_on_one_device(emb, 4, update=update, reference=reference)


@pytest.fixture(scope="module")
def four_devices():
    """Return embeddings of all kinds on four devices, their update, and lookups on one device."""
    emb = embeddings_of_all_kinds().over(4)
    return emb, update_of(emb, 4), jax.jit(emb.reference)


@given(st.data())
def test_any_ids_give_the_vectors_of_one_device(four_devices, data):
    emb, update, reference = four_devices
    stored = _stored(emb)
    bags = {}
    for name, table in emb.tables.items():
        few = st.integers(-2, 3) if data.draw(st.booleans()) else st.integers(-2, table.num_rows)
        rows = st.lists(few, min_size=48, max_size=48)
        bags[name] = jnp.asarray(data.draw(rows), jnp.int32).reshape(16, 3)
    result = update(stored, emb.init_optimizer(stored), bags)
    for feature, want in reference(stored, bags).items():
        np.testing.assert_array_equal(result.embedded[feature], want)
    for name, ids in bags.items():
        parts = np.split(np.asarray(ids), 4)
        real = [set(part[(part >= 0) & (part < emb.tables[name].num_rows)]) for part in parts]
        num_requested = result.metrics[f"embeddings/{name}/asked"]
        np.testing.assert_array_equal(num_requested, [len(r) for r in real])
        invalid = result.metrics[f"embeddings/{name}/invalid"]
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
def test_lookup_and_update_equal_those_of_one_device(shard, pooling, num_shards, check_vma):
    tables = tables_of(shard, pooling)
    emb = js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_adagrad(RATE))
    assert_equal_on_one_device(emb, num_shards, check_vma=check_vma)
