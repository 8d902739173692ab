"""Gradients that lose something: what error feedback makes up for, and what travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import lift
from support.reports import merged

REPLICAS = 4
STEPS = 60
MAKERS = {"int8": js.hooks.int8, "fp8": js.hooks.fp8}
HOOKS = {
    "int8": js.hooks.int8(block_size=32),
    "int8 without": js.hooks.int8(block_size=32, error_feedback=False),
    "e4m3 random": js.hooks.fp8(block_size=32, stochastic_rounding=True),
    "e5m2": js.hooks.fp8(format="e5m2", block_size=32),
    "top_k": js.hooks.top_k(0.2),
}
SHAPES = {"a": (50, 3), "b": (7,), "half": (40,)}


def reduced(hooks, grads, execution):
    """Results by hook, stacked over replicas and steps, and the last states."""
    reductions = {n: js.all_reduce_gradients("replica", hook=hook) for n, hook in hooks.items()}

    def per_replica(grads):
        def step(states, grads):
            out = {n: tx.update(grads, states[n]) for n, tx in reductions.items()}
            return {n: s for n, (_, s) in out.items()}, {n: m for n, (m, _) in out.items()}

        first = jax.tree.map(lambda g: g[0], grads)
        start = {n: tx.init(first) for n, tx in reductions.items()}
        states, means = jax.lax.scan(step, start, grads)
        return means, states

    out = lift(per_replica, {"replica": REPLICAS}, execution, (False,))(grads)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), out)


def test_results_add_up_to_the_means():
    """Exactly: what is missing from the sum of results is the mean of the last residuals.

    Gradients are the same in every step, so without error feedback errors grow with the steps.
    """
    rng, grads = np.random.default_rng(0), {}
    for name, shape in SHAPES.items():
        one = jnp.asarray(rng.normal(size=(REPLICAS, 1, *shape)), "float32")
        one = one.astype("bfloat16") if name == "half" else one
        grads[name] = jnp.repeat(one, STEPS, axis=1)
    means, states = reduced(HOOKS, grads, "shard_map")
    for name in HOOKS:
        missing = {}
        for leaf, grad in grads.items():
            found = means[name][leaf]
            assert all(np.array_equal(x, found[0]) for x in found), (name, leaf)
            wanted = np.asarray(grad, np.float64).mean(axis=0)
            missing[leaf] = (wanted - found[0]).sum(axis=0).ravel()
            most = {"int8": 0.05, "top_k": 20}.get(name, 0.6)
            off = np.abs(missing[leaf]).max()
            assert off > 0.1 if "without" in name else off < most, (name, leaf)
        # Leaves lie in reverse order in buckets; the bfloat16 one has a bucket of its own.
        sizes = {b.shape[1]: b.mean(axis=0) for b in jax.tree.leaves(states[name].hook)}
        assert bool(sizes) == ("without" not in name)
        if sizes:
            both = np.concatenate([missing["b"], missing["a"]])
            np.testing.assert_allclose(sizes[157], both, atol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_random_rounding_is_right_on_average_and_buckets_draw_apart(name):
    """Over 300 updates that differ only by their number."""
    x = np.random.default_rng(1).normal(size=(REPLICAS, 48)).astype(np.float32)
    hook = MAKERS[name](block_size=16, error_feedback=False, stochastic_rounding=True)
    tx = js.all_reduce_gradients("replica", hook=hook, first_bucket_bytes=0)

    def reduced(number, x):
        grads = {"first": x, "second": x}
        return tx.update(grads, tx.init(grads)._replace(count=number))[0]

    over_replicas = jax.vmap(reduced, axis_name="replica", in_axes=(None, 0))
    drawn = jax.jit(jax.vmap(over_replicas, in_axes=(0, None)))(jnp.arange(300), x)
    first = np.asarray(drawn["first"], np.float64)[:, 0]
    spread = first.std(axis=0) / np.sqrt(300)
    assert np.all(spread > 0)
    assert np.all(np.abs(first.mean(axis=0) - x.mean(axis=0, dtype=np.float64)) < 5 * spread)
    assert not np.array_equal(drawn["second"][0, 0], first[0])


def test_what_is_not_finite_shows_and_passes():
    """Blocks of 8 in chunks of 16: NaN and inf make their blocks NaN, once."""
    x = np.random.default_rng(3).normal(size=(REPLICAS, 3, 64)).astype(np.float32)
    x[2, 0, 3], x[0, 0, 20], x[1, 0, 63] = np.nan, np.inf, -np.inf
    hooks = {name: make(block_size=8) for name, make in MAKERS.items()}
    means, states = reduced(hooks, {"w": jnp.asarray(x)}, "vmap")
    for name in hooks:
        found = means[name]["w"]
        lost = np.isnan(found[:, 0]).reshape(REPLICAS, 8, 8)
        assert np.array_equal(lost.all(axis=2), lost.any(axis=2))
        assert np.array_equal(lost.any(axis=2), [[i in (0, 2, 7) for i in range(8)]] * REPLICAS)
        assert np.isfinite(found[:, 1:]).all()
        assert np.isfinite(states[name].hook[0]).all()
        np.testing.assert_allclose(found[0, 1:].mean(axis=0), x[:, 1:].mean(axis=(0, 1)), atol=0.3)


def sent(hook, dtype=jnp.float32):
    tx = js.all_reduce_gradients("replica", hook=hook, bucket_bytes=10**9)
    step = lift(lambda g: tx.update(g, tx.init(g))[0], {"replica": 8}, "shard_map", (False,))
    shapes = jax.ShapeDtypeStruct((8, 1_001_003), dtype)
    report = js.comm_report_of(step.lower(shapes), compile=False)
    return report, [(row.collective, row.count, row.bytes) for row in merged(report.rows)]


@pytest.mark.parametrize("hook", [js.hooks.int8(), js.hooks.fp8(stochastic_rounding=True)])
def test_bytes_of_a_chunk_to_each_replica(hook):
    """Scales of 256 elements, and padding, are among them."""
    blocks = -(-1_001_003 // (8 * 256))
    nbytes = 8 * (-(-(blocks * 260) // 128) * 128)
    report, found = sent(hook)
    assert found == [("all-to-all", 1, nbytes), ("all-gather", 1, nbytes)]
    assert 0 < report.bytes(content="padding") < 0.01 * report.bytes()


def test_bytes_of_the_largest():
    _, ((collective, count, nbytes),) = sent(js.hooks.top_k(0.01), jnp.bfloat16)
    assert (collective, count) == ("all-gather", 1)
    per_replica = 10_011 * (4 + 2)
    assert 8 * per_replica <= nbytes < 8 * (per_replica + 128)


def test_ratio_and_k():
    """Number of elements that are not 0 after one update of one replica's worth."""
    cases = [({"k": 5}, 5), ({"k": 500}, 100), ({"ratio": 0.07}, 7), ({"ratio": 0.071}, 8), ({}, 1)]
    x = np.random.default_rng(0).normal(size=(1, 100)).astype(np.float32).repeat(2, 0)
    hooks = [js.hooks.top_k(**options) for options, _ in cases]
    reductions = [js.all_reduce_gradients("replica", hook=hook) for hook in hooks]
    fn = lambda x: [tx.update(x, tx.init(x))[0] for tx in reductions]  # noqa: E731
    found = jax.jit(jax.vmap(fn, axis_name="replica"))(x)
    for (_, count), mean in zip(cases, found, strict=True):
        assert np.count_nonzero(mean[0]) == count
        largest = np.sort(np.abs(x[0]))[-count:]
        np.testing.assert_array_equal(np.sort(np.abs(mean[0]))[-count:], largest)
