"""The state of a run: how it starts, what its copies hold, and that nothing else holds it."""

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


def test_replicas_start_alike_but_for_their_keys():
    mesh, source = KINDS["auto"]({"replica": 4}), jax.tree.map(jnp.asarray, PARAMS)
    sync = js.local_sgd("replica")
    step = js.make_train_step(loss, optax.adam(0.1), sync=sync, mesh=mesh)
    state, again, other = (
        step.init(source, model_state={"n": jnp.zeros(2)}, seed=seed) for seed in (1, 1, 2)
    )
    assert state.step.tolist() == [0] * 4
    for name, x in PARAMS.items():
        np.testing.assert_array_equal(state.params[name], np.stack([x] * 4))
    assert state.model_state["n"].shape == (4, 2)
    assert jax.tree.leaves(state.opt_state)[0].shape[0] == 4
    bits = [np.asarray(s.rng) for s in (state, again, other)]
    assert len({row.tobytes() for row in (*bits[0], *bits[2])}) == 8
    np.testing.assert_array_equal(bits[0], bits[1])


def test_copies_train_on_and_nothing_of_a_state_is_kept():
    mesh, sync = js.virtual_mesh({"replica": 2}), js.local_sgd("replica", sync_every=3)
    step = js.make_train_step(
        loss, optax.adam(0.1), sync=sync, mesh=mesh, mode="host", donate=False
    )
    state = step.init(PARAMS)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    wanted = jax.tree.map(np.asarray, step(state, BATCHES[3])[0].params)
    for other in (copy.copy(state), copy.deepcopy(state), state._replace(rng=state.rng)):
        assert_close(step(other, BATCHES[3])[0].params, wanted, atol=0)
    leaves = [weakref.ref(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    del state, other
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)


def test_the_optimizers_state_of_one_copy_goes_on_on_every_replica():
    """A state of another optimizer is refused by name, before anything runs."""
    step = js.make_train_step(
        loss, optax.adam(0.1), sync="none", mesh=js.virtual_mesh({"replica": 2})
    )
    params = {"w": jnp.ones(3)}
    known = optax.adam(0.1).init(params)
    known = (known[0]._replace(mu={"w": jnp.arange(3.0)}), *known[1:])
    state = step.init(params, opt_state=known)
    assert np.asarray(state.opt_state[0].mu["w"]).tolist() == [[0, 1, 2]] * 2
    with pytest.raises(ValueError, match="`opt_state` must be that of one copy"):
        step.init(params, opt_state=optax.sgd(0.1).init(params))
