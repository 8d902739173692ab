"""Lookups and updates are those of whole tables on one device, however they are shared."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from embedding.shared import (
    POOLINGS,
    RATE,
    SHARDS,
    batch_of,
    loss_of,
    mixed,
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


def check(emb, num_shards, check_vma=True, tolerance=2e-5):
    emb, bags = emb.over(num_shards), bags_for(emb)
    stored = emb.init(jax.random.key(0))
    found = update_of(emb, num_shards, check_vma=check_vma)(
        stored, emb.init_optimizer(stored), bags
    )
    reference = jax.jit(emb.reference)(stored, bags)
    assert set(found.embedded) == set(reference)
    for feature, want in reference.items():
        np.testing.assert_array_equal(found.embedded[feature], want)
        assert found.embedded[feature].dtype == want.dtype
    tables = emb.read(stored)
    wanted, moved = dense_update(emb, tables, bags), emb.read(found.tables)
    for name, want in wanted.items():
        np.testing.assert_allclose(
            moved[name].astype(jnp.float32), want, rtol=tolerance, atol=tolerance
        )
    return emb, stored, found


@pytest.mark.parametrize("num_shards", [1, 4])
def test_all_kinds_in_one_program_are_tables_of_one_device(num_shards):
    check(mixed(), num_shards)


CASES = sweep(
    itertools.product(SHARDS, POOLINGS, SIZES, (True, False)),
    lambda shard, pooling, size, checked: (
        (shard, pooling, size, checked)
        in {("row", "sum", 8, False), ("column", "mean", 2, True), ("table", None, 2, True)}
    ),
)


@pytest.mark.parametrize(("shard", "pooling", "num_shards", "check_vma"), CASES)
def test_lookup_and_update_are_those_of_one_device(shard, pooling, num_shards, check_vma):
    tables = tables_of(shard, pooling)
    emb = js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_adagrad(RATE))
    check(emb, num_shards, check_vma)
