"""Weighted means against NumPy in float64: no factor is rounded to the dtype of a leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.collectives import all_mean, quotient
from support.executions import lift

# 257 needs nine bits, and bfloat16 has eight: there, it is 256.
WEIGHTS = np.array([100, 57, 0, 100], np.float32)
MIXES = {
    "beside float32": ("bfloat16", "float32"),
    "beside float16": ("bfloat16", "float32", "float16"),
    "alone": ("bfloat16",),
}
BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def exact_entries(rng, count):
    """(4, count) small integers whose weighted sums, also partial ones, bfloat16 holds exactly."""
    x = rng.integers(0, 4, size=(4, 200 * count))
    parts = np.cumsum(WEIGHTS[:, None] * x, axis=0)
    every = [*parts, *(parts[-1] - parts), parts[0] + parts[-1] - parts[2]]
    exact = [np.asarray(p.astype(jnp.bfloat16), np.float64) == p for p in every]
    x = x[:, np.logical_and.reduce(exact)]
    return x[:, WEIGHTS @ x > 0][:, :count]


@functools.cache
def means(execution="vmap", **options):
    """Programs of `(grads, weights)`: the means by both ways to count idle replicas."""

    def both(g, w):
        found = {}
        for divide_by in ("initial", "active"):
            tx = js.all_reduce_gradients("replica", divide_by=divide_by, **options)
            found[divide_by] = tx.update(g, tx.init(g), weight=w)[0]
        return found

    return lift(both, {"replica": 4}, execution, (False, False))


@pytest.mark.parametrize(
    ("mix", "execution"),
    [("beside float32", "vmap"), ("beside float16", "shard_map"), ("alone", "pmap")],
)
def test_a_total_that_half_precision_does_not_hold(mix, execution):
    """Within the roundings of what is sent, and of the result: far from the 0.4 % of 257."""
    entries = exact_entries(np.random.default_rng(0), 64)
    grads = {name: entries.astype(jnp.dtype(name)) for name in MIXES[mix]}
    for grad in grads.values():
        grad[2] = np.nan  # of weight 0
    exact = WEIGHTS @ entries.astype(np.float64) / 257
    for divide_by, found in means(execution)(grads, WEIGHTS).items():
        wanted = np.stack([exact * (0.75 if divide_by == "initial" else 1)] * 4)
        for name, mean in found.items():
            limit = 1.001 * 2 * 2.0 ** -BITS[name]
            np.testing.assert_allclose(np.float64(mean), wanted, rtol=limit)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 57.0, 257.0, -1.0, np.nan]), min_size=4, max_size=4),
    st.integers(0, 99),
)
def test_any_weights(weights, seed):
    """Weights below 0 and NaN count as 0."""
    weights = np.float32(weights)
    values = np.random.default_rng(seed).uniform(1, 2, size=(4, 8))
    grads = {name: values.astype(jnp.dtype(name)) for name in ("bfloat16", "float32")}
    counted = np.where(weights > 0, weights, 0)
    for divide_by, found in means()(grads, weights).items():
        for name, mean in found.items():
            total = counted.sum()
            share = np.mean(counted > 0) if divide_by == "initial" else 1
            x = grads[name].astype(np.float64)
            wanted = (counted @ x / total * share) if total else np.zeros(8)
            # Parts, and sums of two and of all, are rounded on the way; the mean at the end.
            limit = 5 * 2.0 ** -BITS[name]
            np.testing.assert_allclose(np.float64(mean), np.stack([wanted] * 4), rtol=limit)


def test_large_values_do_not_overflow_in_float16():
    """The only replica with data has weight R times the mean, and a value near the largest."""
    grads = {"h": np.float16([[40000.0], [1], [1], [1]])}
    found = means()(grads, np.array([3, 0, 0, 0], np.float32))
    assert found["active"]["h"].tolist() == [[40000.0]] * 4
    plain = jax.vmap(lambda v: all_mean(v, "replica"), axis_name="replica")
    np.testing.assert_allclose(plain(jnp.full((3, 3), 60_000, jnp.float16)), 60_000, rtol=1e-3)
    x = np.float32([np.random.default_rng(0).normal(size=1000)] * 4)
    assert np.array_equal(plain(x), x)  # 2 or 4 replicas that agree keep their value


def test_a_number_of_replicas_that_half_precision_does_not_hold():
    """The plain mean of 257 replicas, whose number is 256 in bfloat16, and a quotient by 257."""
    values = np.zeros((257, 1), jnp.bfloat16)
    values[:128] = 1
    mean = jax.vmap(lambda x: all_mean(x, "replica"), axis_name="replica")(values)
    assert float(mean[0, 0]) == float(jnp.bfloat16(128 / 257)) != float(jnp.bfloat16(0.5))
    x = jnp.asarray([1.0, 3, 314], jnp.bfloat16)
    found = quotient(x, jnp.float32(257))
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [float(jnp.bfloat16(float(v) / 257)) for v in x]
    assert quotient(x, jnp.float32(0)).tolist() == [0, 0, 0]
