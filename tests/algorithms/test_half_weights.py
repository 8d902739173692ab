"""Weighted means of parameters in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js


@pytest.mark.parametrize("local", [None, "device"])
def test_float16_does_not_overflow_where_one_replica_weighs_most(local):
    """Large values, and a weight four times the mean: the product alone would not fit."""
    tx = js.local_sgd("replica", sync_every=1, local_axis_name=local)
    params = np.full((4, 6), 30000, np.float16)
    weights = np.float32([1, 0, 0, 0])

    def one(p, weight):
        return p + tx.update(jnp.zeros_like(p), tx.init(p), p, weight=weight)[0]

    mapped = jax.vmap(one, axis_name="device", axis_size=2, in_axes=None, out_axes=None)
    fn = one if local is None else mapped
    moved = jax.vmap(fn, axis_name="replica")(params, weights)
    np.testing.assert_allclose(np.asarray(moved, np.float32), 30000, rtol=1e-3)


@pytest.mark.parametrize("transform", ["local_sgd", "slowmo", "diloco"])
def test_totals_are_not_rounded(transform):
    """A total weight of 257 is 256 in bfloat16."""
    make = {
        "local_sgd": lambda: js.local_sgd("replica", sync_every=1),
        "slowmo": lambda: js.slowmo(
            "replica", base=js.local_sgd("replica", sync_every=1), sync_every=1, momentum=0.0
        ),
        "diloco": lambda: js.diloco("replica", sync_every=1, outer_optimizer=optax.sgd(1.0)),
    }
    tx = make[transform]()
    rng = np.random.default_rng(0)
    start = {"half": jnp.bfloat16, "single": jnp.float32}
    one_copy = rng.normal(size=64)
    params = {k: jnp.asarray(np.tile(one_copy, (4, 1)), dtype) for k, dtype in start.items()}
    steps = {k: jnp.asarray(rng.normal(size=(4, 64)), jnp.float32) for k in start}
    weights = np.float32([200, 50, 6, 1])

    def one(p, u, weight):
        updates, _ = tx.update(u, tx.init(p), p, weight=weight)
        return jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, p, updates)

    moved = jax.jit(jax.vmap(one, axis_name="replica"))(params, steps, weights)
    for key, tolerance in (("single", 1e-5), ("half", 2e-2)):
        y = np.asarray(params[key], np.float64) + np.asarray(steps[key], np.float64)
        mean = np.average(y, axis=0, weights=weights)
        error = np.asarray(moved[key], np.float64) - mean
        assert np.abs(error).max() < tolerance
        # A wrong total would make all of them too large, by 0.4 %.
        assert abs(np.sum(error * mean) / np.sum(mean**2)) < tolerance / 8
