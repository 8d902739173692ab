"""A chain of one's own whose optimizer remembers parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.array([1.0, -2.0], np.float32)}
GRADS = np.random.default_rng(0).normal(size=(5, 2, 2)).astype(np.float32)


def sync():
    return js.local_sgd("replica", sync_every=2)


def run(tx, weights=None):
    """Parameters of two replicas after each update of a loop of one's own."""
    mesh = js.virtual_mesh({"replica": 2})
    stacked = js.replicate(PARAMS, mesh=mesh)

    @jax.jit
    def update(params, state, grads, weight):
        def one(params, state, grads, weight):
            told = {} if weights is None else {"weight": weight}
            updates, state = tx.update({"w": grads}, state, params, **told)
            return optax.apply_updates(params, updates), state

        return jax.vmap(one, axis_name="replica")(params, state, grads, weight)

    state = js.init(tx, stacked, mesh=mesh)
    shares = np.ones((len(GRADS), 2), np.float32) if weights is None else weights
    found = []
    for grads, weight in zip(GRADS, shares, strict=True):
        stacked, state = update(stacked, state, grads, weight)
        found.append(np.asarray(stacked["w"]))
    return found, state


def test_copies_follow():
    found, state = run(js.chain(optax.clip(9.0), optax.contrib.cocob(), sync()))
    alone, _ = run(optax.contrib.cocob())
    np.testing.assert_allclose(found[1], [alone[1].mean(0)] * 2, rtol=1e-6)
    # Gradients are given, so each replica goes on by the very steps that it takes alone.
    np.testing.assert_allclose(found[2] - found[1], alone[2] - alone[1], atol=1e-6)
    np.testing.assert_allclose(
        found[3], [found[1][0] + (alone[3] - alone[1]).mean(0)] * 2, atol=1e-6
    )
    assert [type(x).__name__ for x in state] == ["EmptyState", "tuple", "LocalSGDState"]


def test_replicas_without_data_follow_too():
    weights = np.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]], np.float32)
    found, _ = run(js.chain(optax.contrib.cocob(), sync()), weights)
    alone, _ = run(optax.contrib.cocob())
    np.testing.assert_allclose(found[1], [alone[1][0]] * 2, rtol=1e-6)
    np.testing.assert_allclose(found[2][0], alone[2][0], atol=1e-6)


def test_it_is_the_chain_of_optax_for_others():
    parts = optax.clip(1.0), optax.adam(0.1)
    ours, ours_state = run(js.chain(*parts, sync()))
    theirs, state = run(optax.chain(*parts, sync()))
    np.testing.assert_array_equal(ours, theirs)
    assert jax.tree.structure(ours_state) == jax.tree.structure(state)


@pytest.mark.parametrize("parts", [(optax.adam(0.1),), (optax.clip(1.0), optax.adam(0.1))])
def test_a_parameter_transform_is_not_required(parts):
    ours, ours_state = run(js.chain(*parts))
    theirs, state = run(optax.chain(*parts))
    np.testing.assert_array_equal(ours, theirs)
    assert jax.tree.structure(ours_state) == jax.tree.structure(state)


def test_chains_in_chains_are_one():
    clip, adam, average = optax.clip(1.0), optax.adam(0.1), sync()
    tx = js.chain(js.chain(clip, js.chain(adam)), js.chain(average))
    assert tx.parts == (clip, adam, average)
    np.testing.assert_array_equal(run(tx)[0], run(js.chain(clip, adam, average))[0])


def test_what_is_no_transform():
    with pytest.raises(ValueError, match="chain: `transforms` must be optax transforms, got 3"):
        js.chain(optax.adam(0.1), 3)


def test_the_chain_of_a_step_carries_outside_of_the_step_too():
    mesh = js.virtual_mesh({"replica": 2})
    loss = lambda p, b: jnp.sum(p["w"] * b)  # noqa: E731
    step = js.make_train_step(loss, optax.contrib.cocob(), sync=sync(), mesh=mesh)
    found, _ = run(step.tx)
    state = step.init(PARAMS)
    for grads, expected in zip(GRADS, found, strict=True):
        state, _ = step(state, grads)
        np.testing.assert_allclose(state.params["w"], expected, atol=1e-6)


@pytest.mark.parametrize("chain", [js.chain, optax.chain])
def test_a_chain_as_the_optimizer_of_a_step(chain):
    """Ours carries, and is not warned of."""
    mesh = js.virtual_mesh({"replica": 2})
    optimizer = chain(optax.contrib.cocob(), sync())
    step = js.make_train_step(lambda p, b: jnp.sum(p["w"] * b), optimizer, mesh=mesh)
    if chain is optax.chain:
        with pytest.warns(UserWarning, match=r"COCOBState.*js\.chain"):
            step.init(PARAMS)
        return
    state = step.init(PARAMS)
    found, _ = run(optimizer)
    for grads, expected in zip(GRADS, found, strict=True):
        state, _ = step(state, grads)
        np.testing.assert_allclose(state.params["w"], expected, atol=1e-6)


def test_parameter_transforms_alone():
    found, _ = run(js.chain(sync()))
    np.testing.assert_allclose(found[1], [(PARAMS["w"] + GRADS[:2].sum(0)).mean(0)] * 2, rtol=1e-6)


def test_copies_follow_each_of_several():
    """Equal gradients after the first average leave replicas equal, whatever comes last."""
    parts = optax.contrib.cocob(), sync(), js.local_sgd("replica", sync_every=4)
    found, _ = run(js.chain(*parts))
    expected, _ = run(js.chain(*parts[:2]))
    np.testing.assert_allclose(found, expected, atol=1e-6)
