"""Only the largest gradients travel, and the others wait."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.collectives import mean_in_codec
from jaxslowmo.collectives.codecs import TopK


def draw(replicas, size, seed=0):
    return np.random.default_rng([seed, size]).normal(size=(replicas, size)).astype(np.float32)


def oracle(x, k, dtype=np.float32):
    """(mean, lost) of one round; values travel in `dtype`."""
    mean, lost = np.zeros(x.shape[1], np.float32), x.copy()
    for row, left in zip(x, lost, strict=True):
        chosen = np.argsort(-np.abs(row), kind="stable")[:k]
        sent = row[chosen].astype(dtype).astype(np.float32)
        mean[chosen] += sent
        left[chosen] -= sent
    return (mean / np.float32(len(x))).astype(dtype), lost


@settings(max_examples=4)
@given(st.integers(2, 8), st.integers(1, 3000), st.sampled_from(["float32", "bfloat16"]), st.data())
def test_against_numpy(replicas, size, dtype, data):
    k = data.draw(st.integers(1, size))
    x = draw(replicas, size)
    codec = TopK(count=k, values=jnp.dtype(dtype))
    fn = functools.partial(mean_in_codec, axis_name="replica", codec=codec)
    mean, lost = map(np.asarray, jax.jit(jax.vmap(fn, axis_name="replica"))(x))
    wanted_mean, wanted_lost = oracle(x, k, jnp.dtype(dtype))
    assert np.array_equal(lost, wanted_lost)
    rtol = 1e-6 if dtype == "float32" else 2**-8  # compilers divide by 3 inexactly
    np.testing.assert_allclose(mean[0], np.float32(wanted_mean), rtol=rtol)
    assert all(np.array_equal(row, mean[0]) for row in mean)


def test_what_is_not_finite_is_sent_first_and_passes():
    x = np.tile(draw(2, 12)[:, None], (1, 2, 1))
    x[0, 0, 3], x[1, 0, 7] = np.nan, -np.inf
    tx = js.all_reduce_gradients("replica", hook=js.hooks.top_k(k=1))

    def per_replica(x):
        first, state = tx.update(x[0], tx.init(x[0]))
        second, state = tx.update(x[1], state)
        return first, second, state.hook[0]

    first, second, residual = jax.jit(jax.vmap(per_replica, axis_name="replica"))(x)
    for row in np.asarray(first):
        assert np.isnan(row[3])
        assert row[7] == -np.inf
        assert np.count_nonzero(row) == 2
    assert np.isfinite(second).all()
    assert np.isfinite(residual).all()


def test_ratio_and_k():
    """Number of elements that are not 0 after one update of one replica's worth."""
    cases = [({"k": 5}, 5), ({"k": 500}, 100), ({"ratio": 0.07}, 7), ({"ratio": 0.071}, 8), ({}, 1)]
    x = np.broadcast_to(draw(1, 100), (2, 100))
    hooks = [js.hooks.top_k(**options) for options, _ in cases]
    reductions = [js.all_reduce_gradients("replica", hook=hook) for hook in hooks]
    fn = lambda x: [tx.update(x, tx.init(x))[0] for tx in reductions]  # noqa: E731
    found = jax.jit(jax.vmap(fn, axis_name="replica"))(x)
    for (_, count), mean in zip(cases, found, strict=True):
        assert np.count_nonzero(mean[0]) == count
        largest = np.sort(np.abs(x[0]))[-count:]
        np.testing.assert_array_equal(np.sort(np.abs(mean[0]))[-count:], largest)
