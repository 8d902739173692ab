"""Model state and metrics: equal on devices and on virtual replicas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

KINDS = {"mesh": js.make_mesh, "virtual": js.virtual_mesh}
BATCH = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def loss(params, batch, *, model_state):
    positive = jnp.sum(batch > 0)
    metrics = {"mean": batch.mean(), "positive": positive, "rate": 0.1, "finite": batch.min() < 9}
    new = {"stat": 0.5 * model_state["stat"] + batch.mean(0), "n": model_state["n"] + 1}
    return jnp.sum(params["w"] * batch.mean(0)), (metrics, new)


def floats_only(params, batch, *, model_state):
    value, (metrics, new) = loss(params, batch, model_state=model_state)
    return value, ({"mean": metrics["mean"]}, new)


def one_step(fn, kind, axes, steps=1, **options):
    options = {"sync": js.local_sgd("replica", sync_every=2), **options}
    step = js.make_train_step(fn, optax.sgd(0.1), mesh=KINDS[kind](axes), **options)
    state = step.init(
        {"w": np.ones(3, np.float32)},
        model_state={"stat": np.zeros(3, np.float32), "n": np.int32(0)},
    )
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, metrics


@pytest.mark.parametrize(
    ("mode", "accumulate"), [("sync_mean", 1), ("sync_mean", 2), ("broadcast", 2), ("local", 1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_after_each_step(kind, mode, accumulate):
    means = BATCH.reshape(4, accumulate, -1, 3).mean(2)
    expected = np.zeros((4, 3))
    for t in (1, 2, 3):
        if mode == "broadcast":
            expected = np.broadcast_to(expected[0], (4, 3))
        for part in range(accumulate):
            expected = 0.5 * expected + means[:, part]
        if mode == "sync_mean" and t == 2:
            expected = np.broadcast_to(expected.mean(0), (4, 3))
    state, _ = one_step(
        floats_only, kind, {"replica": 4}, steps=3, model_state=mode, accumulate=accumulate
    )
    np.testing.assert_allclose(state.model_state["stat"], expected, atol=1e-6)
    assert np.array_equal(state.model_state["n"], [3 * accumulate] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_sync_statistics_are_averaged_every_time(kind):
    state, _ = one_step(
        floats_only, kind, {"replica": 4}, sync=None, gradients=js.all_reduce_gradients("replica")
    )
    np.testing.assert_allclose(state.model_state["stat"], [BATCH.mean(0)] * 4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_the_devices_of_a_replica_are_averaged(kind):
    state, metrics = one_step(floats_only, kind, {"replica": 2, "device": 2}, model_state="local")
    halves = BATCH.reshape(2, 8, 3).mean(1)
    np.testing.assert_allclose(state.model_state["stat"], halves, atol=1e-6)
    np.testing.assert_allclose(metrics["mean"], halves.mean(1), atol=1e-6)
    assert np.array_equal(state.model_state["n"], [1, 1])


@pytest.mark.parametrize(
    ("axes", "accumulate"),
    [({"replica": 4}, 1), ({"replica": 4}, 2), ({"replica": 2, "device": 2}, 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_other_types_are_averaged_too(kind, axes, accumulate):
    """Counts are averaged over what saw parts of the batch, whichever way it runs."""
    _, metrics = one_step(loss, kind, axes, accumulate=accumulate)
    replicas, parts = axes["replica"], axes.get("device", 1) * accumulate
    counts = (BATCH.reshape(replicas, parts, -1) > 0).sum(-1).mean(1)
    np.testing.assert_allclose(metrics["positive"], counts)
    np.testing.assert_allclose(metrics["rate"], [0.1] * replicas)
    assert np.array_equal(metrics["finite"], [1] * replicas)


def test_counters_that_differ_between_replicas_are_kept_alike():
    def counting(params, batch, *, model_state):
        seen = model_state["n"] + jnp.sum(batch > 0)
        return jnp.sum(params["w"] * batch.mean(0)), ({}, {**model_state, "n": seen})

    found = [
        np.asarray(one_step(counting, kind, {"replica": 4}, steps=2)[0].model_state["n"]).tolist()
        for kind in KINDS
    ]
    assert found[0] == found[1]


def test_a_loss_that_takes_no_model_state():
    step = js.make_train_step(
        lambda p, b: jnp.sum(p["w"] * b),
        optax.sgd(0.1),
        sync=js.local_sgd("replica"),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = step.init({"w": np.ones(3, np.float32)}, model_state={"s": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"`loss_fn` must take `model_state` as a keyword"):
        step(state, BATCH)


def test_model_state_may_be_an_array():
    step = js.make_train_step(
        lambda p, b, *, model_state: (jnp.sum(p["w"] * b), ({}, model_state + 1)),
        optax.sgd(0.1),
        sync=js.local_sgd("replica"),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = step.init({"w": np.ones(3, np.float32)}, model_state=np.zeros(2, np.float32))
    state, _ = step(state, BATCH)
    assert np.array_equal(state.model_state, np.ones((2, 2)))
