"""A small problem for steps of every kind, and how to run one on it."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.meshes import MESHES

RNG = np.random.default_rng(0)


PARAMS = {
    "b": RNG.normal(size=3).astype(np.float32),
    "w": RNG.normal(size=(8, 3)).astype(np.float32),
}


BATCHES = RNG.normal(size=(6, 32, 8)).astype(np.float32)


RATE = optax.linear_schedule(0.2, 0.0, 5)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"][None]) ** 2)


KINDS = MESHES


def train(step, state, batches=BATCHES[:4]):
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def trained(optimizer, fn=loss, batches=BATCHES[:4], weight=None, **options):
    """Return the state of a new step after these batches, all with one weight."""
    step = js.make_train_step(fn, optimizer, **options)
    state = step.init(PARAMS)
    for batch in batches:
        state, _ = step(state, batch, weight)
    return state


def assert_close(found, expected, atol=2e-6):
    for key in expected:
        np.testing.assert_allclose(
            found[key], np.broadcast_to(expected[key], found[key].shape), atol=atol, err_msg=key
        )
