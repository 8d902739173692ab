"""Hyperparameters that are set between steps, on all replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.promotion import promoting

PARAMS = {"w": np.zeros(3, np.float32)}
BATCH = np.ones((4, 3), np.float32)
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
RATES = [0.5, np.float32(0.5), jnp.float32(0.5), 2, np.float32([0.5] * 2)]


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
    for rate in RATES:
        for assigns in (False, True):
            compiled = compilations.count
            if assigns:
                state.opt_state.hyperparams["learning_rate"] = rate
            else:
                given, state = state, js.set_hyperparams(state, learning_rate=rate)
                assert state.params["w"] is given.params["w"]
                assert (
                    given.opt_state.hyperparams["learning_rate"]
                    is not state.opt_state.hyperparams["learning_rate"]
                )
            state, _ = step(state, BATCH)
            moved += float(np.max(np.asarray(rate)))
            np.testing.assert_allclose(state.params["w"], np.full((2, 3), -moved))
            if np.ndim(rate) == 0 or not assigns:
                assert compilations.count == compiled
    after = state.opt_state.hyperparams["learning_rate"]
    assert (after.shape, after.dtype, after.sharding) == ((2,), before.dtype, before.sharding)


def test_one_number_per_replica():
    step = step_of(sync="none")
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=[1.0, 3.0])
    state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["w"][:, 0], [-1, -3])


@pytest.mark.parametrize("make", [js.virtual_mesh, js.make_mesh])
def test_wherever_they_stand(make):
    """In chains and wrappers, and one inside of another, also assigned."""

    def scaled(factor):
        inner = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5)
        several = promoting(optax.MultiSteps(inner, 1).gradient_transformation())
        wrapped = optax.masked(several, True)
        return optax.chain(optax.clip(9.0), wrapped, optax.scale(factor))

    step = step_of(optax.inject_hyperparams(scaled)(factor=2.0), mesh=make)
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


def test_one_that_is_an_array():
    def per_leaf(rates):
        return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rates * g, grads))

    step = step_of(optax.inject_hyperparams(per_leaf)(rates=jnp.ones(3)), js.make_mesh)
    for value in (2.0, [2.0] * 3, np.full((2, 3), 2.0)):
        state, _ = step(js.set_hyperparams(step.init(PARAMS), rates=value), BATCH)
        np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -2.0))
    with pytest.raises(ValueError, match=r"`rates`.*\(2, 3\).*\(2,\)"):
        js.set_hyperparams(state, rates=np.ones(2))


@jax.tree_util.register_pytree_node_class
class Nameless:
    """A state whose class names no children."""

    def __init__(self, inner):
        self.inner = inner

    def tree_flatten(self):
        return (None, self.inner), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[1])


def test_inside_of_a_state_that_names_no_children():
    def update(grads, state, params=None):
        updates, inner = SGD.update(grads, state.inner, params)
        return updates, Nameless(inner)

    step = step_of(optax.GradientTransformation(lambda p: Nameless(SGD.init(p)), update))
    state = step.init(PARAMS)
    state.opt_state.inner.hyperparams["learning_rate"] = 0.5
    state, _ = step(state, BATCH)
    state, _ = step(js.set_hyperparams(state, learning_rate=0.25), BATCH)
    np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -0.75))
