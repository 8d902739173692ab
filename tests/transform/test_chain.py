"""Tests of `js.chain`, also with an optimizer whose state holds copies of the parameters."""

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


def history_and_state(tx, weights=None):
    """Return the parameters of two replicas after each update, and the last state."""
    mesh = js.virtual_mesh({"replica": 2})
    stacked = js.replicate(PARAMS, mesh=mesh)

    @jax.jit
    def update(params, state, grads, weight):
        def one(params, state, grads, weight):
            extra = {} if weights is None else {"weight": weight}
            updates, state = tx.update({"w": grads}, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return jax.vmap(one, axis_name="replica")(params, state, grads, weight)

    state = js.init(tx, stacked, mesh=mesh)
    shares = np.ones((len(GRADS), 2), np.float32) if weights is None else weights
    history = []
    for grads, weight in zip(GRADS, shares, strict=True):
        stacked, state = update(stacked, state, grads, weight)
        history.append(np.asarray(stacked["w"]))
    return history, state


def test_copies_follow_the_average():
    history, state = history_and_state(js.chain(optax.clip(9.0), optax.contrib.cocob(), sync()))
    without_sync, _ = history_and_state(optax.contrib.cocob())
    np.testing.assert_allclose(history[1], [without_sync[1].mean(0)] * 2, rtol=1e-6)
    # Gradients are fixed, so each replica goes on by the same steps as without `sync`.
    np.testing.assert_allclose(
        history[2] - history[1], without_sync[2] - without_sync[1], atol=1e-6
    )
    np.testing.assert_allclose(
        history[3], [history[1][0] + (without_sync[3] - without_sync[1]).mean(0)] * 2, atol=1e-6
    )
    assert [type(x).__name__ for x in state] == ["EmptyState", "tuple", "LocalSGDState"]


def test_copies_of_replicas_without_data_follow_the_average():
    weights = np.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]], np.float32)
    history, _ = history_and_state(js.chain(optax.contrib.cocob(), sync()), weights)
    without_sync, _ = history_and_state(optax.contrib.cocob())
    np.testing.assert_allclose(history[1], [without_sync[1][0]] * 2, rtol=1e-6)
    np.testing.assert_allclose(history[2][0], without_sync[2][0], atol=1e-6)


def test_it_equals_the_chain_of_optax_for_optimizers_without_copies():
    parts = optax.clip(1.0), optax.adam(0.1)
    ours, ours_state = history_and_state(js.chain(*parts, sync()))
    theirs, state = history_and_state(optax.chain(*parts, sync()))
    np.testing.assert_array_equal(ours, theirs)
    assert jax.tree.structure(ours_state) == jax.tree.structure(state)


@pytest.mark.parametrize("parts", [(optax.adam(0.1),), (optax.clip(1.0), optax.adam(0.1))])
def test_without_a_parameter_transform_it_equals_the_chain_of_optax(parts):
    ours, ours_state = history_and_state(js.chain(*parts))
    theirs, state = history_and_state(optax.chain(*parts))
    np.testing.assert_array_equal(ours, theirs)
    assert jax.tree.structure(ours_state) == jax.tree.structure(state)


def test_nested_chains_are_flattened():
    clip, adam, average = optax.clip(1.0), optax.adam(0.1), sync()
    tx = js.chain(js.chain(clip, js.chain(adam)), js.chain(average))
    assert tx.parts == (clip, adam, average)
    np.testing.assert_array_equal(
        history_and_state(tx)[0], history_and_state(js.chain(clip, adam, average))[0]
    )


def test_what_is_no_transform_is_refused():
    with pytest.raises(ValueError, match="chain: `transforms` must be optax transforms, got 3"):
        js.chain(optax.adam(0.1), 3)


def test_the_chain_of_a_step_gives_the_same_run_outside_of_the_step():
    mesh = js.virtual_mesh({"replica": 2})
    loss = lambda p, b: jnp.sum(p["w"] * b)  # noqa: E731
    step = js.make_train_step(loss, optax.contrib.cocob(), sync=sync(), mesh=mesh)
    history, _ = history_and_state(step.tx)
    state = step.init(PARAMS)
    for grads, expected in zip(GRADS, history, strict=True):
        state, _ = step(state, grads)
        np.testing.assert_allclose(state.params["w"], expected, atol=1e-6)


@pytest.mark.parametrize("chain", [js.chain, optax.chain])
def test_copies_follow_in_a_step_with_js_chain_and_optax_chain_warns(chain):
    """The copies follow only in `js.chain`."""
    mesh = js.virtual_mesh({"replica": 2})
    optimizer = chain(optax.contrib.cocob(), sync())
    step = js.make_train_step(lambda p, b: jnp.sum(p["w"] * b), optimizer, mesh=mesh)
    if chain is optax.chain:
        with pytest.warns(UserWarning, match=r"COCOBState.*js\.chain"):
            step.init(PARAMS)
        return
    state = step.init(PARAMS)
    history, _ = history_and_state(optimizer)
    for grads, expected in zip(GRADS, history, strict=True):
        state, _ = step(state, grads)
        np.testing.assert_allclose(state.params["w"], expected, atol=1e-6)


def test_a_chain_may_hold_only_parameter_transforms():
    history, _ = history_and_state(js.chain(sync()))
    np.testing.assert_allclose(
        history[1], [(PARAMS["w"] + GRADS[:2].sum(0)).mean(0)] * 2, rtol=1e-6
    )


def test_copies_follow_each_of_several_averages():
    """Equal gradients after the first average leave replicas equal, whatever comes last."""
    parts = optax.contrib.cocob(), sync(), js.local_sgd("replica", sync_every=4)
    history, _ = history_and_state(js.chain(*parts))
    expected, _ = history_and_state(js.chain(*parts[:2]))
    np.testing.assert_allclose(history, expected, atol=1e-6)
