"""Optimizers whose branches and loops jax refuses on devices where values are typed as varying."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tracing import run_where_values_vary

PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}


def loss(params):
    return jnp.sum((params["w"] - 0.3) ** 2)


# Each raises TypeError on its own; optax.MultiSteps an assertion of jax.
REFUSED = {
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ),
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4)),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4)
    ),
}


def told(params):
    value, grad = jax.value_and_grad(loss)(params)
    return grad, {"value": value, "grad": grad}


def updated(tx, params, state, run):
    def update(grad, state, params, extra):
        return tx.update(grad, state, params, value_fn=loss, **extra)

    grad, extra = told(params)
    updates, state = run(update, grad, state, params, extra)
    return optax.apply_updates(params, updates), state


def on_devices(tx, run):
    mesh = js.make_mesh({"replica": 2})

    def per_replica(params):
        params = jax.tree.map(lambda x: x[0], params)
        params, state = updated(tx, params, tx.init(params), run)
        return jax.tree.map(lambda x: x[None], updated(tx, params, state, run)[0])

    mapped = jax.shard_map(per_replica, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    return jax.jit(mapped)(jax.tree.map(lambda x: np.stack([x, 2 * x]), PARAMS))


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_it(name):
    tx = optax.with_extra_args_support(REFUSED[name])
    with pytest.raises((TypeError, AssertionError)):
        on_devices(tx, lambda fn, *operands: fn(*operands))
    found = on_devices(tx, run_where_values_vary)["w"]
    for replica, factor in enumerate([1, 2]):
        params = jax.tree.map(lambda x, factor=factor: factor * x, PARAMS)
        state = tx.init(params)
        for _ in range(2):
            params, state = updated(tx, params, state, lambda fn, *operands: fn(*operands))
        np.testing.assert_allclose(found[replica], params["w"], rtol=1e-5, atol=1e-6)


def test_what_must_not_be_run_so():
    def run(fn, *operands):
        return run_where_values_vary(fn, *operands, refused="it exchanges")

    with pytest.raises(ValueError, match="it exchanges"):
        on_devices(optax.with_extra_args_support(REFUSED["lbfgs"]), run)


def test_errors_of_its_own_stay():
    def wrong(x):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        run_where_values_vary(wrong, jnp.ones(3))
