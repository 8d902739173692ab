"""Libraries that save trees of arrays save a state as it is, and a run goes on from it."""

import io

import equinox as eqx
import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxslowmo as js

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(3, 2)).astype(np.float32) for name in ("v", "w")}
BATCHES = RNG.normal(size=(6, 8, 3)).astype(np.float32)


def noisy_loss(params, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch.shape).astype(batch.dtype)
    return ((batch * kept) @ (params["v"] + params["w"])).var()


def by_flax(state, like, folder):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))


def by_equinox(state, like, folder):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def by_numpy(state, like, folder):
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(state))
    file.seek(0)
    return jax.tree.structure(like).unflatten(np.load(file).values())


def by_orbax(state, like, folder):
    """A manager of checkpoints that the user has."""
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as m:
        m.save(3, args=ocp.args.StandardSave(state))
        m.wait_until_finished()
        types = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = m.restore(m.latest_step(), args=ocp.args.StandardRestore(types))
    assert found.params["w"].sharding == state.params["w"].sharding
    return found


@pytest.mark.parametrize("kind", ["mesh", "fragments"])
def test_a_run_goes_on_from_what_was_saved(kind, tmp_path):
    make = js.make_mesh if kind == "mesh" else js.virtual_mesh
    base = js.local_sgd("replica", sync_every=2)
    options = {"fragments": 2, "delay": 1} if kind == "fragments" else {}
    sync = js.slowmo("replica", base=base, sync_every=4, **options)
    step = js.make_train_step(
        noisy_loss, optax.adam(0.1), sync=sync, mesh=make({"replica": 4}), donate=False
    )
    *_, middle = js.train_loop(step, step.init(PARAMS, seed=3), BATCHES[:3])
    *_, last = js.train_loop(step, middle.state, BATCHES[3:])
    for saved in (by_flax, by_equinox, by_numpy, by_orbax):
        found = saved(middle.state, step.init(PARAMS), tmp_path)
        assert isinstance(found, js.TrainState)
        *_, again = js.train_loop(step, found, BATCHES[3:])
        assert (last.step, again.step) == (6, 6)
        jax.tree.map(np.testing.assert_array_equal, again.state, last.state)
