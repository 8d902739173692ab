"""Replicas agree to the bit after an exchange that makes them agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS = 3
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(4, 2 * REPLICAS, 40)).astype(np.float32)
SYNCS = {
    "average": js.local_sgd("replica", sync_every=4),
    "outer": js.diloco("replica", sync_every=4),
}


@pytest.mark.parametrize(
    ("name", "mode", "dtype"), [("average", "traced", "bfloat16"), ("outer", "host", "float32")]
)
def test_replicas_are_equal_after_an_exchange(name, mode, dtype):
    """Parameters are set to its result: none is a difference that is added to old ones."""
    params = {"w": np.zeros(40, jnp.dtype(dtype))}

    def loss(params, batch):
        return jnp.sum(batch * params["w"].astype(jnp.float32)[None])

    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss, optax.sgd(0.3), mesh=mesh, sync=SYNCS[name], mode=mode)
    state = step.init(params)
    for i, batch in enumerate(BATCHES):
        state, _ = step(state, batch)
        found = np.asarray(state.params["w"].astype(jnp.float32))
        are_equal = bool(np.all(found == found[:1]))
        assert are_equal == (i == len(BATCHES) - 1)
    assert jax.tree.map(lambda x: x.dtype, state.params) == {"w": jnp.dtype(dtype)}
