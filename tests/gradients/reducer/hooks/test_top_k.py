"""Only the largest gradients travel, and the others wait."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.collectives import top_k_mean
from support.executions import EXECUTIONS, lift


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


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_against_numpy(execution):
    """To the bit, with a float32 and a bfloat16 bucket."""
    dtypes = {"f": jnp.dtype(jnp.float32), "h": jnp.dtype(jnp.bfloat16)}
    x = draw(4, 600)

    def both(x):
        return {n: top_k_mean(x, "replica", 200, dtype=dtype) for n, dtype in dtypes.items()}

    found = lift(both, {"replica": 4}, execution, (False,))(x)
    for name, dtype in dtypes.items():
        mean, lost = oracle(x, 200, dtype)
        for row in found[name][0]:
            np.testing.assert_array_equal(np.asarray(row, np.float32), mean.astype(np.float32))
        np.testing.assert_array_equal(found[name][1], lost)


@settings(max_examples=8)
@given(st.integers(2, 8), st.integers(1, 3000), st.data())
def test_any_size(replicas, size, data):
    k = data.draw(st.integers(1, size))
    x = draw(replicas, size)
    fn = functools.partial(top_k_mean, axis_name="replica", k=k, dtype=jnp.dtype("float32"))
    mean, lost = map(np.asarray, jax.jit(jax.vmap(fn, axis_name="replica"))(x))
    wanted_mean, wanted_lost = oracle(x, k)
    assert np.array_equal(lost, wanted_lost)
    np.testing.assert_allclose(mean[0], wanted_mean, rtol=1e-6)  # compilers divide by 3 inexactly
    assert all(np.array_equal(row, mean[0]) for row in mean)


def test_over_several_axes():
    x = draw(4, 50)
    names = {"a": 2, "b": 2}
    fn = functools.partial(top_k_mean, axis_name=("b", "a"), k=5, dtype=jnp.dtype("float32"))
    nested = jax.jit(jax.vmap(jax.vmap(fn, axis_name="b"), axis_name="a"))
    spec = jax.sharding.PartitionSpec("a", "b")
    mapped = jax.shard_map(
        lambda v: [y[None, None] for y in fn(v[0, 0])],
        mesh=js.make_mesh(names),
        in_specs=spec,
        out_specs=spec,
    )
    mean, lost = oracle(x[[0, 2, 1, 3]], 5)  # counted along b first
    for program in (nested, jax.jit(mapped)):
        found = program(x.reshape(2, 2, 50))
        np.testing.assert_array_equal(np.asarray(found[0]), np.broadcast_to(mean, (2, 2, 50)))
        np.testing.assert_array_equal(np.asarray(found[1]).reshape(4, 50), lost[[0, 2, 1, 3]])


def test_what_is_not_sent_comes_later():
    """Results and the mean residual add up to the means; without feedback most never arrives."""
    steps, x = 40, draw(4, 20)
    hooks = {True: js.hooks.top_k(k=2), False: js.hooks.top_k(k=2, error_feedback=False)}
    reductions = {n: js.all_reduce_gradients("replica", hook=hook) for n, hook in hooks.items()}

    def per_replica(x):
        def step(states, _):
            out = {n: tx.update(x, states[n]) for n, tx in reductions.items()}
            return {n: s for n, (_, s) in out.items()}, {n: m for n, (m, _) in out.items()}

        start = {n: tx.init(x) for n, tx in reductions.items()}
        return jax.lax.scan(step, start, length=steps)

    states, means = lift(per_replica, {"replica": 4}, "shard_map", (False,))(x)
    total = {n: np.asarray(m)[0].sum(axis=0) for n, m in means.items()}
    residual = np.asarray(states[True].hook[0])
    wanted = steps * x.mean(axis=0)
    np.testing.assert_allclose(total[True] + residual.mean(axis=0), wanted, atol=1e-4)
    assert np.abs(residual).max() < 20 / 2 * np.abs(x).max()
    assert np.abs(wanted - total[False]).max() > steps * 0.2


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_on_the_wire(dtype):
    hook = js.hooks.top_k(0.01)
    tx = js.all_reduce_gradients("replica", hook=hook, bucket_bytes=10**9)
    step = lift(lambda g: tx.update(g, tx.init(g))[0], {"replica": 8}, "shard_map", (False,))
    shapes = jax.ShapeDtypeStruct((8, 1_000_003), dtype)
    report = js.comm_report_of(step.lower(shapes), compile=False)
    ((collective, count, sent),) = [(r.collective, r.count, r.bytes) for r in report.rows]
    assert (collective, count) == ("all-gather", 1)
    per_replica = 10_001 * (4 + jnp.dtype(dtype).itemsize)
    assert 8 * per_replica <= sent < 8 * (per_replica + 128)


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


def test_arguments_are_checked():
    for options, message in (
        ({"ratio": 0.0}, "`ratio` must be in"),
        ({"ratio": 1.5}, "`ratio` must be in"),
        ({"k": 0}, "`k` must be an int >= 1"),
        ({"k": 1.0}, "`k` must be an int >= 1"),
        ({"ratio": 0.1, "k": 3}, "`ratio` or `k`, not both"),
    ):
        with pytest.raises(ValueError, match=message):
            js.hooks.top_k(**options)
