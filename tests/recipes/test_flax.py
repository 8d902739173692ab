"""Training loops of flax: state made under the axis, replicas together, the task learnt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from recipes.doc_blocks import LOOP, MAPPED, SETTING, run

NNX_OPTIMIZER = "nnx.Optimizer"
LINEN = "flax linen: TrainState"


def assert_trained(kernel, bias):
    """Near the solution, and equal on all replicas after the last slow step."""
    np.testing.assert_allclose(kernel.reshape(4, 3), [[1, -2, 3]] * 4, atol=1.5)
    for leaf in (kernel, bias):
        np.testing.assert_allclose(leaf, np.broadcast_to(leaf[:1], leaf.shape), atol=1e-6)


def test_nnx_as_functions():
    found = run("recipes", SETTING, LOOP, MAPPED, "flax nnx, as functions")
    x, y = found["x"][0], found["y"][0]
    assert jnp.mean((found["model"](x) - y) ** 2) < 0.5 * jnp.var(y)
    assert found["state"].model_state["norm"]["mean"].shape == (4, 3)


def test_nnx_optimizer_in_every_execution():
    found = run("recipes", SETTING, LOOP, MAPPED, NNX_OPTIMIZER)
    kernel = found["model"].kernel[...]
    assert_trained(np.asarray(kernel), np.asarray(found["model"].bias[...]))
    np.testing.assert_array_equal(found["optimizer"].step[...], [24] * 4)
    unchecked, _ = found["train_nnx"](check_vma=False)
    for other in (unchecked, found["virtual"]):
        np.testing.assert_allclose(other.kernel[...], kernel, rtol=1e-5, atol=1e-6)


def test_nnx_pmap():
    found = run("recipes", SETTING, LOOP, MAPPED, NNX_OPTIMIZER)

    @functools.partial(nnx.pmap, axis_name="replica", devices=jax.devices()[:4])
    def make_optimizer(model):
        tx = optax.chain(optax.adam(0.1), found["slow"]())
        return nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(nnx.pmap, axis_name="replica", devices=jax.devices()[:4])
    def step(model, optimizer, batch):
        x, y = batch
        grads = nnx.grad(lambda model: jnp.mean((model(x)[:, 0] - y) ** 2))(model)
        optimizer.update(model, grads)

    graphdef, variables = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model = nnx.merge(graphdef, jax.tree.map(lambda v: jnp.stack([v] * 4), variables))
    optimizer = make_optimizer(model)
    for batch in found["batches"]:
        shares = jax.tree.map(lambda b: b.reshape(4, -1, *b.shape[1:]), batch)
        step(model, optimizer, shares)
    np.testing.assert_allclose(model.kernel[...], found["model"].kernel[...], rtol=1e-5, atol=1e-6)


def test_linen_checked_and_unchecked():
    found = run("recipes", SETTING, LOOP, MAPPED, LINEN)
    state, unchecked = found["state"], found["train_linen"](check_vma=False)
    assert_trained(np.asarray(state.params["kernel"]), np.asarray(state.params["bias"]))
    np.testing.assert_array_equal(state.step, [24] * 4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        unchecked.params,
        state.params,
    )


def test_init_outside_of_the_axis_says_what_to_do():
    found = run("recipes", SETTING)
    tx = optax.chain(optax.adam(0.1), found["slow"]())
    with pytest.raises(ValueError, match=r"js\.init"):
        TrainState.create(apply_fn=lambda: None, params=found["params"], tx=tx)
    with pytest.raises(ValueError, match=r"js\.init"):
        nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
