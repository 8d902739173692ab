"""What holds for all sizes and values, checked over many of them."""

import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import jaxslowmo as js


def after_updates(sync, params, updates):
    """Parameters of all replicas after each of `updates`, `[steps, replicas, n]`."""

    def one(carry, update):
        p, s = carry
        u, s = sync.update(update, s, p)
        p = optax.apply_updates(p, u)
        return (p, s), p

    def run(p, us):
        return jax.lax.scan(one, (p, sync.init(p)), us)[1]

    mapped = jax.jit(jax.vmap(run, axis_name="replica", in_axes=(0, 1), out_axes=1))
    return np.asarray(mapped(params, updates))


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@settings(max_examples=15)
@given(
    replicas=st.sampled_from([2, 3, 5]),
    size=st.integers(1, 50),
    every=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_slow_momentum_0_and_rate_1_is_plain_averaging(replicas, size, every, seed):
    rng = np.random.default_rng(seed)
    params = np.broadcast_to(rng.normal(size=size), (replicas, size)).astype(np.float32)
    updates = rng.normal(size=(7, replicas, size)).astype(np.float32)
    slowmo = js.slowmo("replica", sync_every=every, momentum=0.0, learning_rate=0.3)
    averaging = js.local_sgd("replica", sync_every=every)
    a, b = (after_updates(sync, params, updates) for sync in (slowmo, averaging))
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@settings(max_examples=15)
@given(
    replicas=st.sampled_from([2, 3, 5]),
    size=st.integers(1, 50),
    every=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_averaging_keeps_the_mean_and_reaches_it(replicas, size, every, seed):
    rng = np.random.default_rng(seed)
    params = rng.normal(size=(replicas, size)).astype(np.float32)
    updates = rng.normal(size=(6, replicas, size)).astype(np.float32)
    history = after_updates(js.local_sgd("replica", sync_every=every), params, updates)
    mean = params.astype(np.float64).mean(0) + np.cumsum(updates.astype(np.float64).mean(1), 0)
    np.testing.assert_allclose(history.mean(1), mean, rtol=1e-5, atol=1e-5)
    for t in range(every - 1, 6, every):
        np.testing.assert_allclose(
            history[t], np.broadcast_to(mean[t], (replicas, size)), rtol=1e-5, atol=1e-5
        )


@settings(max_examples=10)
@given(size=st.integers(1, 60), seed=st.integers(0, 2**31), rate=st.floats(0.01, 0.5))
def test_local_sgd_every_update_with_sgd_is_data_parallel(size, seed, rate):
    rng = np.random.default_rng(seed)
    start = rng.normal(size=size).astype(np.float32)
    grads = rng.normal(size=(5, 4, size)).astype(np.float32)
    params = np.broadcast_to(start, (4, size))
    history = after_updates(
        js.local_sgd("replica", sync_every=1), params, -np.float32(rate) * grads
    )
    expected = start - rate * np.cumsum(grads.astype(np.float64).mean(1), 0)
    for replica in range(4):
        np.testing.assert_allclose(history[:, replica], expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=10)
@given(size=st.integers(1, 60), seed=st.integers(0, 2**31), momentum=st.floats(0, 0.99))
def test_consensus_without_updates_does_not_move(size, seed, momentum):
    rng = np.random.default_rng(seed)
    params = np.broadcast_to(rng.normal(size=size), (4, size)).astype(np.float32)
    slowmo = js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, momentum=momentum
    )
    history = after_updates(slowmo, params, np.zeros((9, 4, size), np.float32))
    np.testing.assert_array_equal(history, np.broadcast_to(params, history.shape))
