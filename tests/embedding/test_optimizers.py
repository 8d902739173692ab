"""Half precision is rounded once, and nothing as large as a table is made.

The rules themselves are compared with NumPy in `test_embeddings.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js

SGD = js.rowwise_sgd(0.1)


def emb_of(optimizer, dtype=jnp.float32, num_rows=8, dim=3) -> js.embedding.Embeddings:
    table = js.Table(num_rows, dim, dtype=dtype)
    return js.embeddings({"t": table}, axis_name=None, optimizer=optimizer)


def update_of(emb):
    """`update(stored, state, ids, targets)`: of sum((pooled - targets)**2) / 2."""

    def update(stored, state, ids, targets):
        requests = emb.exchange_ids({"t": ids})

        def loss(vectors):
            out = emb.pooled(vectors, requests)["t"]
            return jnp.sum((out.astype(targets.dtype) - targets) ** 2) / 2, out

        grads, out = jax.grad(loss, has_aux=True)(emb.lookup(stored, requests))
        new, state = emb.apply(stored, state, emb.send_back(grads, requests))
        return new, state, grads["t"], out

    return jax.jit(update, donate_argnums=(0, 1))


def test_half_precision_is_updated_in_float32_and_rounded_once():
    emb = emb_of(SGD, jnp.bfloat16)
    table = jnp.asarray(np.random.RandomState(0).randn(8, 3), jnp.bfloat16)
    stored, ids = emb.write({"t": table}), jnp.array([[1], [2], [4], [7]])
    stored, *_ = update_of(emb)(stored, emb.init_optimizer(stored), ids, np.ones((4, 3)))
    old = np.asarray(table[ids[:, 0]], np.float32)
    grads = np.asarray(jnp.asarray(old - 1, jnp.bfloat16), np.float32)
    want = jnp.asarray(old - np.float32(0.1) * grads, jnp.bfloat16)
    np.testing.assert_array_equal(emb.read(stored)["t"][ids[:, 0]], want)


def test_half_precision_is_summed_in_float32():
    """In bfloat16 256 + 1 is 256, so a sum of ones would end there; and so would its gradient."""
    emb = emb_of(SGD, jnp.bfloat16)
    table = np.concatenate([[[256, 1, 1]], np.ones((7, 3))])
    stored, ids = emb.write({"t": table}), jnp.array([[0] + [1] * 255])
    _, _, grads, out = update_of(emb)(stored, emb.init_optimizer(stored), ids, np.zeros((1, 3)))
    assert out.dtype == grads.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), [[512, 256, 256]])
    # Row 1 occurs 255 times, each with the gradient `out`.
    want = jnp.asarray([255 * 512, 255 * 256, 255 * 256], jnp.bfloat16)
    np.testing.assert_array_equal(grads[1], want)


@dataclasses.dataclass
class Falling:
    """A schedule without a hash."""

    first: float

    def __call__(self, count):
        return self.first / (1.0 + count)


def test_tables_of_several_optimizers_share_no_array():
    """Names say which tables do, since a checkpoint must not be restored in another order."""

    def names_of(**own):
        tables = {n: js.Table(8, 4, shard="table", optimizer=own.get(n)) for n in "abc"}
        return set(js.embeddings(tables, axis_name="s", optimizer=SGD).over(2).specs)

    assert names_of(a=js.rowwise_sgd(0.1)) == {"tables_float32_4_over_2"}
    assert len(names_of(a=js.rowwise_sgd(Falling(1.0)), b=js.rowwise_sgd(Falling(1.0)))) == 2
    a, b = names_of(a=js.rowwise_sgd(0.2)), names_of(b=js.rowwise_sgd(0.2))
    assert (len(a), len(b), len(a | b)) == (2, 2, 4)


def test_donated_tables_are_updated_in_place():
    emb = emb_of(js.rowwise_adagrad(0.1), num_rows=64_000, dim=32)
    stored = jax.eval_shape(emb.init, jax.random.key(0))
    state = jax.eval_shape(emb.init_optimizer, stored)
    targets = jax.ShapeDtypeStruct((4, 32), jnp.float32)
    ids = jax.ShapeDtypeStruct((4, 2), jnp.int32)
    memory = update_of(emb).lower(stored, state, ids, targets).compile().memory_analysis()
    table_bytes = 4 * 64_000 * 32
    assert memory.alias_size_in_bytes >= table_bytes
    assert memory.temp_size_in_bytes < table_bytes // 100
