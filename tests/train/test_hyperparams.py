"""Hyperparameters that are set between steps, on all replicas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.promotion import promoting

PARAMS = {"w": np.zeros(3, np.float32)}
BATCH = np.ones((4, 3), np.float32)
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def step_of(optimizer=SGD, mesh=js.virtual_mesh, sync=None, **options):
    loss = lambda params, batch: jnp.sum(params["w"] * batch.mean(0))  # noqa: E731
    sync = js.local_sgd("replica", sync_every=3) if sync is None else sync
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh({"replica": 2}), **options)


@pytest.mark.parametrize(("mesh", "mode"), [(js.virtual_mesh, "traced"), (js.make_mesh, "host")])
def test_the_rate_of_all_replicas(mesh, mode, compilations):
    """Under donation, in local steps and averages, and without another program."""
    step = step_of(mesh=mesh, mode=mode)
    state, moved = step.init(PARAMS), 0.0
    for _ in range(3):  # programs of both phases, and of states that a step has returned
        state, _ = step(state, BATCH)
        moved += 1.0
    before = state.opt_state.hyperparams["learning_rate"]
    for rate in (0.5, np.float32(0.5), 2, np.float32([1.0, 3.0])):
        compiled, given = compilations.count, state
        state = js.set_hyperparams(state, learning_rate=rate)
        assert state.params["w"] is given.params["w"]
        state, _ = step(state, BATCH)
        moved += float(np.mean(rate))
        np.testing.assert_allclose(np.asarray(state.params["w"]).mean(0), np.full(3, -moved))
        assert compilations.count == compiled
    state.opt_state.hyperparams["learning_rate"] = 0.5  # assigned
    state, _ = step(state, BATCH)
    np.testing.assert_allclose(np.asarray(state.params["w"]).mean(0), np.full(3, -moved - 0.5))
    after = state.opt_state.hyperparams["learning_rate"]
    assert (after.shape, after.dtype, after.sharding) == ((2,), before.dtype, before.sharding)


def test_wherever_they_stand():
    """In chains and wrappers, and one inside of another, also assigned."""

    def scaled(factor):
        inner = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5)
        several = promoting(optax.MultiSteps(inner, 1).gradient_transformation())
        wrapped = optax.masked(several, True)
        return optax.chain(optax.clip(9.0), wrapped, optax.scale(factor))

    step = step_of(optax.inject_hyperparams(scaled)(factor=2.0))
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=0.25, momentum=0.0)
    for moved in (0.5, 1.0):
        state, _ = step(state, BATCH)
        np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -moved))
    state = js.set_hyperparams(state, factor=4.0)
    inner = state.opt_state.inner_state[1].inner_state.inner_opt_state
    inner.hyperparams["learning_rate"] = 0.5
    state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -3.0))


def test_slowmo_follows():
    """Slow momentum is kept in units of the rate, so both must see the same one."""
    rates = [1.0, 1.0, 0.25, 0.25, 0.25, 0.25]
    schedule, base = lambda t: jnp.asarray(rates)[t], js.local_sgd("replica", sync_every=1)
    given, told = (
        js.slowmo("replica", base=base, sync_every=2, learning_rate=rate)
        for rate in (schedule, "optimizer")
    )
    runs = [step_of(optax.sgd(schedule), sync=given), step_of(SGD, sync=told)]
    states = [step.init(PARAMS) for step in runs]
    for rate in rates:
        states[1] = js.set_hyperparams(states[1], learning_rate=rate)
        states = [step(state, BATCH)[0] for step, state in zip(runs, states, strict=True)]
        np.testing.assert_allclose(*(state.params["w"] for state in states), rtol=1e-6)
