"""Dropout, EMA, weight decay and frozen layers do under rare exchanges what the page says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxslowmo as js
from recipes.doc_blocks import LOOP, MAPPED, SETTING, run

MESH = js.virtual_mesh({"replica": 3})


def recipe(title: str) -> dict[str, Any]:
    return run("recipes", SETTING, LOOP, MAPPED, title)


def assert_close(tree: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tree, expected
    )


def draws(mesh, seed=0, accumulate=1):
    """A number from the key of each replica, in two steps."""

    def loss(params, batch, *, rng):
        return jnp.sum(params["w"]) * 0, {"drawn": jax.random.uniform(rng)}

    step = js.make_train_step(
        loss, optax.sgd(0.1), sync="none", mesh=mesh, accumulate=accumulate, donate=False
    )
    state, found = step.init({"w": jnp.zeros(2)}, seed=seed), []
    for _ in range(2):
        state, metrics = step(state, np.zeros((12, 1), np.float32))
        found.append(np.asarray(metrics["drawn"]))
    return np.concatenate(found)


def test_keys_differ_between_replicas_and_steps_and_follow_the_seed():
    drawn = draws(MESH)
    assert len(set(drawn)) == 6
    np.testing.assert_array_equal(draws(MESH), drawn)
    assert not set(drawn) & set(draws(MESH, seed=1))


def test_keys_differ_between_devices_and_microbatches():
    """What is drawn with the replica's key on all would be the same after the mean."""
    for means in (
        draws(js.virtual_mesh({"replica": 3, "device": 2})),
        draws(MESH, accumulate=2),
    ):
        assert len(set(means)) == 6
        assert not set(means) & set(draws(MESH))


def test_dropout_trains_in_the_step_and_in_a_loop():
    found = recipe("Dropout and seeds")
    x, y = found["x"][0], found["y"][0]
    own = nnx.merge(found["graphdef"], js.consensus(found["stacked"], mesh=found["mesh"]))
    for predicted in (found["predicted"], own(x, deterministic=True)):
        assert jnp.mean((predicted - y) ** 2) < 0.5 * jnp.var(y)


@pytest.mark.parametrize("stream", ["default", "dropout"])
def test_a_model_that_keeps_keys_is_reseeded(stream):
    graphdef, keys = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(**{stream: 0})))

    def dropped(reseed):
        def loss(params, batch, *, rng):
            model = nnx.merge(graphdef, keys, copy=True)
            if reseed:
                nnx.reseed(model, **{stream: rng})
            bits = 2.0 ** jnp.arange(16)
            return params["w"] * 0, {"mask": jnp.sum((model(jnp.ones(16)) > 0) * bits)}

        step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=MESH)
        return step(step.init({"w": jnp.zeros([])}), np.zeros((3, 1)))[1]["mask"]

    assert len(set(np.asarray(dropped(False)))) == 1
    assert len(set(np.asarray(dropped(True)))) == 3


def test_the_mean_of_emas_is_the_ema_of_the_consensus():
    found = recipe("EMA, the exponential moving average of parameters")
    step, mesh = found["step"], found["mesh"]
    state = step.init(found["params"])
    expected = found["params"]
    for batch in found["batches"]:
        passed_by = js.consensus(state.params, mesh=mesh)
        expected = optax.incremental_update(passed_by, expected, 0.1)
        state, _ = step(state, batch)
    assert_close(found["averaged"], expected)
    # Replicas, and with them their EMAs, are apart meanwhile.
    assert np.ptp(np.asarray(found["ema"]["w"]), axis=0).max() > 1e-3


def test_weight_decay_sees_one_copy():
    found = recipe("Weight decay")
    step = js.make_train_step(
        lambda params, batch: 0.0 * params["b"], found["decayed"], sync=found["slow"](), mesh=MESH
    )
    state = step.init({"w": jnp.ones(3), "b": jnp.ones(())})
    for _ in range(2):
        state, _ = step(state, np.zeros((3, 1), np.float32))
    assert_close(state.params, {"w": np.full((3, 3), (1 - 0.05 * 0.5) ** 2), "b": np.ones(3)})
    # What the page warns of.
    stacked = jax.tree.map(lambda p: p.ndim > 1, {"b": jnp.ones((4, 3))})
    assert stacked == {"b": True}


def test_frozen_leaves_stay_and_the_others_train_alike():
    found = recipe("Frozen layers")
    mesh, start = found["mesh"], found["params"]
    np.testing.assert_array_equal(found["state"].params["b"], np.full(4, start["b"]))
    np.testing.assert_array_equal(found["adapted"].model_state["b"], np.full(4, start["b"]))
    assert found["whole"]["b"] is found["frozen"]["b"]
    assert_close(found["whole"], js.consensus(found["state"].params, mesh=mesh))
    assert np.abs(np.asarray(found["whole"]["w"])).min() > 0.1


@pytest.mark.parametrize(("kept_apart", "sent"), [(False, 16), (True, 12)])
def test_frozen_leaves_that_are_no_parameters_are_not_sent(kept_apart, sent):
    found = recipe("Frozen layers")
    if kept_apart:
        step, state = found["step"], found["adapted"]
    else:
        step = js.make_train_step(
            found["loss_fn"], found["partly"], sync=found["slow"](), mesh=found["mesh"]
        )
        state = step.init(found["params"])
    lowered = step.traced_by_phase(state, found["batches"][0])[None].lower()
    report = js.comm_report_of(lowered, compile=False)
    rows = report.select(axis="replica", kind="average")
    assert sum(row.bytes for row in rows) == sent


def test_masked_alone_does_not_freeze():
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    tx = optax.masked(optax.adam(0.05), {"w": True, "b": False})
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["b"], params["b"])
