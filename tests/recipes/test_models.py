"""Models of Equinox and Haiku in the training step and in a loop of one's own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from recipes.doc_blocks import LOOP, MAPPED, SETTING, run


@pytest.mark.parametrize("title", ["Equinox", "Haiku", "Keras"])
def test_the_consensus_has_learnt(title):
    found = run("recipes", SETTING, LOOP, MAPPED, title)
    error = jnp.mean((found["predicted"] - found["y"][0]) ** 2)
    assert error < 0.3 * jnp.var(found["y"][0])


def test_haiku_statistics_are_averaged_with_the_parameters():
    found = run("recipes", SETTING, LOOP, MAPPED, "Haiku")
    means = found["state"].model_state["batch_norm/~/mean_ema"]["average"]
    assert means.shape == (4, 1, 3)
    np.testing.assert_array_equal(means, np.broadcast_to(means[:1], means.shape))
    assert np.any(np.asarray(means) != 0)


def test_equinox_in_a_loop_of_ones_own():
    found = run("recipes", SETTING, LOOP, MAPPED, "Equinox")

    def loss(arrays, batch):
        return found["equinox_loss"](arrays, batch, rng=jax.random.key(0))

    stacked, _ = found["train"](found["tx"], params=found["arrays"], grad_fn=jax.grad(loss))
    one = js.consensus(stacked, mesh=found["mesh"])
    before, after = (loss(arrays, found["batches"][0]) for arrays in (found["arrays"], one))
    assert after < 0.5 * before


def test_a_whole_model_as_parameters_is_refused_by_name():
    found = run("recipes", SETTING, LOOP, MAPPED, "Equinox")
    model = found["Regressor"](jax.random.key(0))
    said = r"mlp/activation \(custom_jvp\).*Keep the rest .* `eqx\.partition\("
    with pytest.raises(ValueError, match=said):
        found["step"].init(model)


def test_equinox_statistics_as_model_state():
    norm, statistics = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="ema")
    arrays, rest = eqx.partition(norm, eqx.is_inexact_array)

    def loss(arrays, batch, *, model_state):
        apply = jax.vmap(
            eqx.combine(arrays, rest), axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        out, model_state = apply(batch, model_state)
        return jnp.mean(out**2), ({}, model_state)

    mesh = js.virtual_mesh({"replica": 2})
    sync = js.local_sgd("replica", sync_every=1)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh)
    state = step.init(arrays, model_state=statistics)
    x = np.arange(48, dtype=np.float32).reshape(16, 3)
    state, _ = step(state, x)
    averaged = js.consensus(state.model_state, mesh=mesh)
    leaves = [leaf for leaf in jax.tree.leaves(averaged) if leaf.shape == (3,)]
    # After the first update the running mean is that of the batch, here of both halves together.
    assert any(np.allclose(leaf, x.mean(axis=0)) for leaf in leaves), leaves


def test_masks_of_keras_differ_between_replicas_and_steps():
    found = run("recipes", SETTING, LOOP, MAPPED, "Keras")
    dropout = found["keras"].layers.Dropout(0.5)
    dropout.build((64,))
    seeds = [variable.value for variable in dropout.non_trainable_variables]

    def loss(params, batch, *, model_state):
        out, model_state = dropout.stateless_call([], model_state, jnp.ones(64), training=True)
        return params["w"] * batch.mean(), ({"out": out}, model_state)

    mesh = js.virtual_mesh({"replica": 4})
    masks = {}
    for raw_keys in (True, False):
        step = js.make_train_step(
            loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh, raw_keys=raw_keys
        )
        if raw_keys:
            state = step.init({"w": np.float32(1)}, model_state=seeds)
        else:
            with pytest.warns(UserWarning, match="looks like a PRNG key without a type"):
                state = step.init({"w": np.float32(1)}, model_state=seeds)
        masks[raw_keys] = set()
        for _ in range(2):
            state, metrics = step(state, np.ones(4, np.float32))
            masks[raw_keys] |= {tuple(row) for row in np.asarray(metrics["out"])}
    assert (len(masks[True]), len(masks[False])) == (8, 2)
