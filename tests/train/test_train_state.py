"""The state of a run: how it starts, and what its copies hold."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, KINDS, PARAMS, assert_close, loss


def step_of(**options):
    sync = js.local_sgd("replica", sync_every=3)
    mesh = js.virtual_mesh({"replica": 2})
    return js.make_train_step(loss, optax.adam(0.1), sync=sync, mesh=mesh, **options)


def after_some(step):
    state = step.init(PARAMS)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_start_alike_but_for_their_keys(kind):
    mesh, source = KINDS[kind]({"replica": 4}), jax.tree.map(jnp.asarray, PARAMS)
    make = lambda seed: js.TrainState.create(  # noqa: E731
        source, optax.sgd(0.1, momentum=0.9), mesh=mesh, model_state={"n": jnp.zeros(2)}, seed=seed
    )
    state, again, other = make(1), make(1), make(2)
    assert state.step.tolist() == [0] * 4
    for name, x in PARAMS.items():
        np.testing.assert_array_equal(state.params[name], np.stack([x] * 4))
    assert state.model_state["n"].shape == (4, 2)
    assert jax.tree.leaves(state.opt_state)[0].shape[0] == 4
    bits = [np.asarray(jax.random.key_data(s.rng)) for s in (state, again, other)]
    assert len({row.tobytes() for row in (*bits[0], *bits[2])}) == 8
    np.testing.assert_array_equal(bits[0], bits[1])


def test_nothing_of_a_state_is_kept():
    step = step_of(mode="host", donate=False)
    state = after_some(step)
    jax.block_until_ready(state)
    leaves = [weakref.ref(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    del state
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)


def test_copies_know_nothing():
    state = after_some(step_of())
    assert state.known_layout is not None
    for other in (copy.copy(state), copy.deepcopy(state), state._replace(rng=state.rng)):
        assert other.known_layout is None
        assert_close(other.params, state.params)
