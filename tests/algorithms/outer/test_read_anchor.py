"""The anchor as a tree, wherever it lives."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

MESH = js.virtual_mesh({"replica": 2})


@pytest.mark.parametrize("options", [{}, {"shard_state": False}, {"exact_average": False}])
def test_it_starts_as_the_parameters(options):
    """The anchor of a tuple is read, too; with a base's average each replica has its own."""
    w = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, **options)
    stacked = (np.stack([w, w + ("exact_average" in options)]), np.zeros((2, 1), jnp.bfloat16))
    state = js.init(sync, stacked, mesh=MESH)
    found, half = js.read_anchor(sync, state, stacked, mesh=MESH)
    np.testing.assert_array_equal(found, stacked[0])
    assert found.dtype == half.dtype == np.float32
