"""Rates and momentum as traced values: sweeps by vmap, and gradients with respect to them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

REPLICAS = 2
TARGETS = jnp.array([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


def over(**options):
    base = js.local_sgd("replica", sync_every=1)
    return js.slowmo("replica", base=base, sync_every=2, **options)


def trained(sync, rate=0.1, weights=None, steps=6):
    """Parameters of all replicas after some updates on a quadratic loss."""

    def run(target, weight):
        params = jnp.zeros(3)

        def step(carry, _):
            params, state = carry
            updates = -rate * (params - target)
            updates, state = sync.update(updates, state, params, learning_rate=rate, weight=weight)
            return (params + updates, state), None

        return jax.lax.scan(step, (params, sync.init(params)), length=steps)[0][0]

    if weights is None:
        weights = jnp.ones(REPLICAS)
    return jax.vmap(run, axis_name="replica")(TARGETS, weights)


SWEEPS = {
    "all": lambda x: over(momentum=x, slow_learning_rate=x, learning_rate=x, nesterov=True),
    "whole": lambda x: over(momentum=x, slow_learning_rate=1 - x, shard_state=False),
    "own anchors": lambda x: over(momentum=x, exact_average=False),
    "outer optimizer": lambda x: js.diloco(
        "replica", sync_every=2, outer_optimizer=optax.sgd(x, momentum=0.9)
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_by_vmap_equals_runs_one_by_one(name):
    values = jnp.array([0.25, 0.75])
    swept = jax.jit(jax.vmap(lambda x: trained(SWEEPS[name](x))))(values)
    for value, found in zip(values, swept, strict=True):
        np.testing.assert_allclose(found, trained(SWEEPS[name](float(value))), rtol=2e-6)


def test_a_sweep_of_training_steps():
    def run(momentum):
        step = js.make_train_step(
            lambda params, batch: 0.5 * jnp.mean((params["w"] - batch) ** 2),
            optax.sgd(0.5),
            sync=over(momentum=momentum),
            mesh=js.virtual_mesh({"replica": REPLICAS}),
            donate=False,
        )
        state = step.init({"w": jnp.zeros(3)})
        for _ in range(4):
            state, _ = step(state, TARGETS)
        return state.params["w"]

    values = jnp.array([0.0, 0.5])
    for value, found in zip(values, jax.vmap(run)(values), strict=True):
        np.testing.assert_allclose(found, run(float(value)), rtol=2e-6)


@pytest.mark.parametrize(
    ("shard_state", "weights"),
    sweep(
        itertools.product([True, False], [[1.0, 1.0], [1.0, 0.0]]),
        lambda shard_state, weights: shard_state and weights[1] == 0,
    ),
)
def test_the_gradient_with_respect_to_the_rate_of_the_optimizer(shard_state, weights):
    sync, weights = over(learning_rate="optimizer", shard_state=shard_state), jnp.array(weights)

    @jax.jit
    def loss(rate):
        return jnp.sum(trained(sync, rate, weights, steps=4) ** 2)

    wanted = (loss(0.11) - loss(0.09)) / 0.02
    assert abs(wanted) > 0.1
    np.testing.assert_allclose(jax.grad(loss)(0.1), wanted, rtol=2e-3)


def test_in_a_loop_on_devices(mesh_of):
    """The types of a state stay as they were, with a rate that is differentiated, too."""
    sync = over(learning_rate="optimizer")

    def run(rate, target):
        params = jax.lax.pcast(jnp.zeros(3), "replica", to="varying")

        def step(carry, _):
            params, state = carry
            updates = -rate * (params - target[0])
            updates, state = sync.update(updates, state, params, learning_rate=rate)
            return (params + updates, state), None

        return jax.lax.scan(step, (params, sync.init(params)), length=4)[0][0][None]

    spec = jax.P("replica")
    mapped = jax.shard_map(
        run, mesh=mesh_of({"replica": REPLICAS}), in_specs=(jax.P(), spec), out_specs=spec
    )
    gradient = jax.jit(jax.grad(lambda rate: jnp.sum(mapped(rate, TARGETS) ** 2)))(0.1)
    wanted = jax.grad(lambda rate: jnp.sum(trained(sync, rate, steps=4) ** 2))(0.1)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0, jnp.inf], ids=repr)
@pytest.mark.parametrize("argument", ["learning_rate", "slow_learning_rate", "momentum"])
def test_rates_that_are_not_finite_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must .*, got {float(value)}"):
        over(**{argument: value})


@pytest.mark.parametrize("value", ["0.5", None, [0.5], np.ones(2)], ids=repr)
@pytest.mark.parametrize("argument", ["slow_learning_rate", "momentum"])
def test_rates_that_are_no_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must be a number"):
        over(**{argument: value})


def test_traced_rates_must_be_scalars():
    for argument in ("momentum", "slow_learning_rate", "learning_rate"):
        with pytest.raises(ValueError, match=rf"`{argument}` must be a number.*\[3\]"):
            jax.eval_shape(lambda x, name=argument: trained(over(**{name: x})), jnp.ones(3))
