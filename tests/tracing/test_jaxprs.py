"""Optimizers whose branches and loops jax refuses where values vary; collectives of others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tracing import collective_axes, run_where_values_vary, unnamed_exchanges

PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}


def loss(params):
    return jnp.sum((params["w"] - 0.3) ** 2)


# Each raises TypeError on its own; optax.MultiSteps an assertion of jax.
REFUSED = {
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ),
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=2)),
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


def test_what_must_not_be_run_so_and_errors_of_its_own_stay():
    def run(fn, *operands):
        return run_where_values_vary(fn, *operands, refused="it exchanges")

    with pytest.raises(ValueError, match="it exchanges"):
        on_devices(optax.with_extra_args_support(REFUSED["reduce_on_plateau"]), run)

    def wrong(x):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        run_where_values_vary(wrong, jnp.ones(3))


WHOLE = {"w": np.ones((2, 3), np.float32)}
MESHES = {
    "devices": js.make_mesh({"replica": 2, "device": 2}),
    "virtual": js.virtual_mesh({"replica": 2, "device": 2}),
}


def found(tx, kind):
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *jnp.shape(x))), tx.init(WHOLE))
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(lambda x: np.stack([x, x]), WHOLE)
    return unnamed_exchanges(tx, params, state, mesh=MESHES[kind], axis_name="replica")


def mean_over(axis):
    return optax.stateless(lambda grads, params: lax.pmean(grads, axis))


def in_a_branch():
    def update(grads, params):
        constant = jax.tree.map(jnp.zeros_like, grads)
        varying = jnp.sum(grads["w"]) > 0
        mean = lax.cond(varying, lambda: grads, lambda: constant)
        return lax.pmean(mean, "replica")

    return optax.stateless(update)


CASES = {
    "nothing": (optax.adam(0.1), set()),
    "a mean": (mean_over("replica"), {"replica"}),
    "over several": (
        optax.chain(optax.clip(1.0), mean_over(("replica", "device"))),
        {"replica", "device"},
    ),
    "where types are in the way": (in_a_branch(), {"replica"}),
    "a loss that it needs": (optax.chain(optax.polyak_sgd(), mean_over("device")), {"device"}),
    "ours": (js.all_reduce_gradients("replica"), set()),
    "named": (js.gradient_transform(mean_over("replica")), set()),
    "what cannot be traced": (mean_over("nowhere"), set()),
    "no more than it knows": (optax.contrib.sam(optax.sgd(0.1), mean_over("replica")), {"replica"}),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "devices") for name in CASES), ("over several", "virtual")]
)
def test_axes(name, kind):
    tx, axes = CASES[name]
    assert found(tx, kind) == axes


def test_axes_of_the_collectives_in_a_program():
    def program(x):
        inner = jax.vmap(lambda v: v + lax.pmean(v, "run"), axis_name="run")(x)
        y = jax.jit(lambda v: lax.ppermute(v, "replica", [(0, 1), (1, 0)]))(inner)
        z = lax.cond(y[0, 0] > 0, lambda v: lax.psum(v, ("node", "replica")), lambda v: v, y)
        return z.sum() + lax.axis_index("slice")

    seen = []

    def one(x):
        seen.append(collective_axes(jax.make_jaxpr(program)(x).jaxpr))
        return x

    for name in ("replica", "node", "slice"):
        one = jax.vmap(one, axis_name=name)
    jax.eval_shape(one, jnp.ones((2, 2, 2, 3, 3)))
    assert seen == [{"replica", "node"}]
