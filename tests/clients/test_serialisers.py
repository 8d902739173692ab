"""Libraries that save trees of arrays save a state as it is, and a run goes on from it."""

import io

import equinox as eqx
import flax.serialization
import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 2)).astype(np.float32)}
BATCHES = RNG.normal(size=(6, 8, 3)).astype(np.float32)


def noisy_loss(params, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch.shape)
    return ((batch * kept) @ params["w"]).var()


def by_flax(state, like):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))


def by_equinox(state, like):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def by_numpy(state, like):
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(state))
    file.seek(0)
    return jax.tree.structure(like).unflatten(np.load(file).values())


@pytest.mark.parametrize("saved", [by_flax, by_equinox, by_numpy])
@pytest.mark.parametrize("kind", ["mesh", "virtual"])
def test_a_run_goes_on_from_what_was_saved(kind, saved):
    make = js.make_mesh if kind == "mesh" else js.virtual_mesh
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    step = js.make_train_step(
        noisy_loss, optax.adam(0.1), sync=sync, mesh=make({"replica": 4}), donate=False
    )
    *_, middle = js.train_loop(step, step.init(PARAMS, seed=3), BATCHES[:3])
    *_, last = js.train_loop(step, middle.state, BATCHES[3:])
    found = saved(middle.state, step.init(PARAMS))
    assert isinstance(found, js.TrainState)
    *_, again = js.train_loop(step, found, BATCHES[3:])
    assert (last.step, again.step) == (6, 6)
    jax.tree.map(np.testing.assert_array_equal, again.state, last.state)
