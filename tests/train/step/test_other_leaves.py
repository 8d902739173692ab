"""Leaves without a gradient are refused as parameters; the advice leads to a trained model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

R = 2
WAVE = np.array([1 + 1j, 2 - 1j, -1j], np.complex64)
OTHERS = {
    "order": np.array([2, 0, 1], np.int32),
    "flag": np.array(True),
    "key": jax.random.key(0),
    "wave": WAVE,
}
W = {"w": np.zeros(3, np.float32)}
BATCH = np.ones((R, 3), np.float32)


def local():
    return js.local_sgd("replica", sync_every=2)


MASKED = optax.masked(optax.chain(optax.sgd(0.1), local()), {"w": True, "other": False})
SETTINGS = {
    "sync": {"optimizer": optax.sgd(0.1), "sync": local()},
    "gradients": {
        "optimizer": optax.sgd(0.1),
        "gradients": js.all_reduce_gradients("replica"),
    },
    "apart": {"optimizer": optax.sgd(0.1), "sync": "none"},
    "masked": {"optimizer": MASKED},
}


def step_of(loss, **setting):
    return js.make_train_step(loss, mesh=js.virtual_mesh({"replica": R}), **setting)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_other_leaves_are_refused_when_a_state_is_made(setting, name):
    step = step_of(lambda params, batch: jnp.mean((params["w"] - batch) ** 2), **SETTINGS[setting])
    said = rf"`params`: .* real floating-point leaves only, got other \({OTHERS[name].dtype}\)"
    with pytest.raises(ValueError, match=said):
        step.init({**W, "other": OTHERS[name]})


def test_other_leaves_are_refused_in_states_that_were_made_elsewhere():
    step = step_of(lambda params, batch: jnp.mean((params["w"] - batch) ** 2), **SETTINGS["apart"])
    state = step.init(W)
    params = {**state.params, "order": jnp.zeros((R, 3), jnp.int32)}
    with pytest.raises(ValueError, match=r"got order \(int32\)"):
        step(state._replace(params=params), BATCH)


@pytest.mark.parametrize("setting", ["sync", "gradients", "apart"])
def test_they_train_as_model_state(setting):
    """They are handed to the loss function and stay as they are; each replica has its own key."""

    def loss(params, batch, *, model_state):
        assert jnp.issubdtype(model_state["key"].dtype, jax.dtypes.prng_key)
        sign = jnp.where(model_state["flag"], 1.0, -1.0)
        wanted = jnp.abs(model_state["wave"])[model_state["order"]]
        return jnp.sum((sign * params["w"] - wanted * batch) ** 2), ({}, model_state)

    step = step_of(loss, **SETTINGS[setting])
    state = step.init(W, model_state=OTHERS)
    for _ in range(60):
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(state.params["w"], [np.abs(WAVE)[OTHERS["order"]]] * R, rtol=1e-4)
    for name in ("order", "flag", "wave"):
        np.testing.assert_array_equal(state.model_state[name], [OTHERS[name]] * R)
    assert state.model_state["key"].dtype == OTHERS["key"].dtype


def test_complex_parameters_train_as_two_real_ones():
    def loss(params, batch):
        wave = jax.lax.complex(params["real"], params["imag"])
        return jnp.sum(jnp.abs(wave - WAVE * batch) ** 2)

    step = step_of(loss, **SETTINGS["sync"])
    state = step.init({"real": W["w"], "imag": W["w"]})
    for _ in range(60):
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(state.params["real"] + 1j * state.params["imag"], [WAVE] * R, 1e-4)


def test_in_a_loop_of_ones_own_they_are_masked_with_zeros_as_gradients():
    """What the error of a transform advises; weight decay would else move integers."""
    params = {**W, "order": OTHERS["order"]}
    tx = optax.masked(optax.chain(optax.adamw(0.1), local()), {"w": True, "order": False})

    def run(target):
        def update(carry, _):
            params, state = carry
            grads = {"w": params["w"] - target, "order": jnp.zeros_like(params["order"])}
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(update, (params, tx.init(params)), length=80)[0][0]

    with pytest.raises(ValueError, match=r"order \(int32\): .*optax.masked.* zeros"):
        jax.vmap(lambda _: local().init(params), axis_name="replica")(BATCH)
    found = jax.vmap(run, axis_name="replica")(jnp.ones((R, 3)))
    np.testing.assert_allclose(found["w"], 1, atol=0.1)
    np.testing.assert_array_equal(found["order"], [OTHERS["order"]] * R)
