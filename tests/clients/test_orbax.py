"""A manager of checkpoints that the user has, and a state that comes back to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxslowmo as js

RNG = np.random.default_rng(0)
BATCHES = list(RNG.normal(size=(14, 8, 3)).astype(np.float32))
PARAMS = {"w": jnp.ones((3, 2)), "half": jnp.ones(2, jnp.bfloat16)}


def loss_fn(params, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.8, (3,))
    return jnp.mean(((batch * kept) @ params["w"] + params["half"]) ** 2)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def step():
    base = js.local_sgd("replica", sync_every=3)
    sync = js.slowmo("replica", base=base, sync_every=6, learning_rate=0.05)
    mesh = js.make_mesh({"replica": 4})
    return js.make_train_step(loss_fn, optax.adam(0.05), sync=sync, mesh=mesh, donate=False)


def test_a_run_goes_on_to_the_bit(step, tmp_path):
    """Saved between two averages, where every replica is somewhere else."""
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as m:
        state = step.init(PARAMS, seed=3)
        for result in js.train_loop(step, state, BATCHES):
            if result.step in (4, 7):
                m.save(result.step, args=ocp.args.StandardSave(result.state))
        m.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, step.init(PARAMS))
        found = m.restore(m.latest_step(), args=ocp.args.StandardRestore(like))
    assert isinstance(found, js.TrainState)
    assert found.params["w"].sharding == result.state.params["w"].sharding
    *_, last = js.train_loop(step, found, BATCHES[7:])
    assert last.step == 14
    same_bits(last.state, result.state)
