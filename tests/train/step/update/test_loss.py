"""Means over many microbatches or batches keep what each adds, whatever the dtype."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

PARTS = 512


def step_of(loss, **options):
    sync, mesh = js.local_sgd("replica", sync_every=8), js.virtual_mesh({"replica": 2})
    return js.make_train_step(loss, optax.sgd(1.0), sync=sync, mesh=mesh, **options)


def trained(loss, params, batch, *, accumulate):
    """State and metrics after one step of SGD at rate 1."""
    step = step_of(loss, accumulate=accumulate)
    return step(step.init(params), batch)


def test_equal_microbatches_give_the_gradient_of_one():
    """One after the other in float16, ones stop adding at 2048."""
    dtype = "float16"
    params, ones = {"w": np.zeros(2, dtype)}, np.ones((2 * PARTS * 6, 1), dtype)

    def loss(params, batch):
        return jnp.mean(jnp.sum(params["w"][None] * batch, axis=1) + jnp.ones([], dtype))

    state, metrics = trained(loss, params, ones, accumulate=PARTS * 6)
    assert state.params["w"].dtype == metrics["loss"].dtype == dtype
    np.testing.assert_array_equal(state.params["w"].astype(np.float32), -1)
    np.testing.assert_array_equal(metrics["loss"].astype(np.float32), 1)


def test_as_the_mean_in_float64():
    """Of bfloat16 gradients that differ, beside float32 ones; rounded once, at the end."""
    rng = np.random.default_rng(0)
    params = {"half": np.zeros(3, jnp.bfloat16), "whole": np.zeros(3, np.float32)}
    batch = rng.normal(size=(2, PARTS, 3)).astype(jnp.bfloat16)

    def loss(params, batch):
        whole = params["whole"][None] * batch.astype(jnp.float32)
        parts = params["half"][None] * batch, whole
        return sum(jnp.sum(x).astype(jnp.float32) for x in parts), {"first": batch[0, 0]}

    state, metrics = trained(loss, params, batch.reshape(-1, 3), accumulate=PARTS)
    wanted = batch.astype(np.float64).mean(1)
    np.testing.assert_allclose(-state.params["whole"], wanted, rtol=1e-5, atol=1e-7)
    # Rounded once, to 8 bits.
    half = -np.asarray(state.params["half"]).astype(np.float64)
    np.testing.assert_allclose(half, wanted, rtol=2**-8)
    assert metrics["first"].dtype == jnp.float32
    np.testing.assert_allclose(metrics["first"], wanted[:, 0], rtol=1e-5, atol=1e-7)
