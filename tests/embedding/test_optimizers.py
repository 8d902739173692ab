"""Row-wise updates against NumPy; only rows with a gradient move; nothing table-sized is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

IDS = np.array([[0, 3], [3, -1], [5, 0], [2, 2]])


def emb_of(optimizer, dtype=jnp.float32, num_rows=8, dim=3) -> js.Embeddings:
    table = js.Table(num_rows, dim, dtype=dtype)
    return js.embeddings({"t": table}, axis_name=None, optimizer=optimizer)


def update_of(emb):
    """`update(stored, state, ids, targets, active)`: of sum((pooled - targets)**2) / 2."""

    def update(stored, state, ids, targets, active=None):
        requests = emb.exchange_ids({"t": ids})

        def loss(vectors):
            return jnp.sum((emb.pooled(vectors, requests)["t"] - targets) ** 2) / 2

        grads = jax.grad(loss)(emb.lookup(stored, requests))
        return emb.apply(stored, state, emb.send_back(grads, requests), active=active)

    return jax.jit(update, donate_argnums=(0, 1))


class InNumPy:
    """The rules, with one accumulator per row."""

    def __init__(self, table, rate, eps=None, decay=0.0, initial=0.0):
        self.table, self.rate, self.eps, self.decay = table.astype(np.float32), rate, eps, decay
        self.sums = np.full(len(table), initial, np.float32)

    def step(self, ids, targets, count):
        grads, used = np.zeros_like(self.table), sorted(set(ids[ids >= 0]))
        for bag, target in zip(ids, targets, strict=True):
            rows = bag[bag >= 0]
            np.add.at(grads, rows, self.table[rows].sum(axis=0) - target)
        rate = np.float32(self.rate(count) if callable(self.rate) else self.rate)
        for row in used:
            grad = grads[row]
            if self.eps is None:
                self.table[row] -= rate * (grad + np.float32(self.decay) * self.table[row])
            else:
                self.sums[row] += np.sum(grad * grad) / len(grad)
                self.table[row] -= rate / (np.sqrt(self.sums[row]) + np.float32(self.eps)) * grad


CASES = {
    "adagrad": (js.rowwise_adagrad(0.3, eps=1e-3, initial=0.1), {"eps": 1e-3, "initial": 0.1}),
    "sgd": (js.rowwise_sgd(0.3, weight_decay=0.1), {"decay": 0.1}),
    "schedule": (js.rowwise_adagrad(lambda count: 0.5 / (count + 1)), {"eps": 1e-8}),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_numpy(name):
    optimizer, options = CASES[name]
    emb, random = emb_of(optimizer), np.random.RandomState(0)
    table = random.randn(8, 3).astype(np.float32)
    rate = optimizer.learning_rate
    want = InNumPy(table.copy(), rate, **options)
    stored = emb.write({"t": table})
    state, update = emb.init_optimizer(stored), update_of(emb)
    for count in range(4):
        ids = random.permutation(IDS.reshape(-1)).reshape(IDS.shape)
        targets = random.randn(4, 3).astype(np.float32)
        stored, state = update(stored, state, jnp.asarray(ids), targets)
        want.step(ids, targets, count)
    assert int(state.count) == 4
    found = np.asarray(emb.read(stored)["t"])
    np.testing.assert_allclose(found, want.table, rtol=2e-5, atol=1e-6)
    unused = [1, 4, 6, 7]
    np.testing.assert_array_equal(found[unused], table[unused])
    if "eps" in options:
        sums = emb.read({"t": jnp.broadcast_to(state.accumulators["t"][:, None], (64, 3))})["t"]
        np.testing.assert_allclose(sums[:, 0], want.sums, rtol=2e-5)
    else:
        assert state.accumulators == {}


def test_the_first_update_by_hand():
    """g = (3, 4): the mean square is 12.5, and the row moves by g / sqrt(12.5)."""
    emb = emb_of(js.rowwise_adagrad(1.0), dim=2)
    stored = emb.write({"t": np.zeros((8, 2))})
    targets = np.array([[-3.0, -4.0]] + [[0.0, 0.0]] * 3, np.float32)
    ids = jnp.array([[6], [-1], [-1], [-1]])
    stored, state = update_of(emb)(stored, emb.init_optimizer(stored), ids, targets)
    row = emb.read(stored)["t"][6]
    np.testing.assert_allclose(row, np.array([-3.0, -4.0]) / np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(np.max(state.accumulators["t"]), 12.5, rtol=1e-6)


def test_an_update_that_is_not_active_changes_nothing():
    emb = emb_of(js.rowwise_adagrad(0.3))
    table = np.random.RandomState(0).randn(8, 3).astype(np.float32)
    stored = emb.write({"t": table})
    state, update = emb.init_optimizer(stored), update_of(emb)
    targets = np.full((4, 3), np.nan, np.float32)
    stored, state = update(stored, state, jnp.asarray(IDS), targets, jnp.bool_(False))
    np.testing.assert_array_equal(emb.read(stored)["t"], table)
    assert int(state.count) == 0
    assert not np.asarray(state.accumulators["t"]).any()
    stored, state = update(stored, state, jnp.asarray(IDS), 0 * table[:4], jnp.bool_(True))
    assert int(state.count) == 1
    assert not np.array_equal(emb.read(stored)["t"], table)


def test_half_precision_is_updated_in_float32_and_rounded_once():
    emb = emb_of(js.rowwise_sgd(0.1), jnp.bfloat16)
    table = jnp.asarray(np.random.RandomState(0).randn(8, 3), jnp.bfloat16)
    stored = emb.write({"t": table})
    ids = jnp.array([[1], [2], [4], [7]])
    stored, _ = update_of(emb)(stored, emb.init_optimizer(stored), ids, np.ones((4, 3)))
    old = np.asarray(table[ids[:, 0]], np.float32)
    grads = np.asarray(jnp.asarray(old - 1, jnp.bfloat16), np.float32)
    want = jnp.asarray(old - np.float32(0.1) * grads, jnp.bfloat16)
    found = emb.read(stored)["t"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[ids[:, 0]], want)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: js.rowwise_adagrad(-0.1), r"`learning_rate` must be a number >= 0.*-0\.1"),
        (lambda: js.rowwise_adagrad(float("nan")), r"`learning_rate` must be.*nan"),
        (lambda: js.rowwise_adagrad(0.1, eps=0), r"`eps` must be a number > 0, got 0"),
        (lambda: js.rowwise_adagrad(0.1, initial=-1), r"`initial` must be a number >= 0"),
        (lambda: js.rowwise_sgd("0.1"), r"rowwise_sgd: `learning_rate` must be.*'0\.1'"),
        (lambda: js.rowwise_sgd(0.1, weight_decay=-1), r"`weight_decay` must be a number >= 0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
