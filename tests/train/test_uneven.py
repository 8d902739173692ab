"""Replicas with different amounts of data: weights in the step, and the loop that gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS = 4
SHAPE = (2, 3)  # a local batch
COUNTS = (3, 1, 2, 3)
RNG = np.random.default_rng(0)
DATA = [RNG.normal(size=(n, *SHAPE)).astype(np.float32) for n in COUNTS]
START = {"w": np.ones(3, np.float32), "b": np.zeros((), np.float32)}


def loss_fn(params, batch):
    loss = jnp.mean((batch @ params["w"] + params["b"] - 1) ** 2)
    return loss, {"twice": 2 * loss}


def gradient(params, batch):
    return jax.grad(lambda p: loss_fn(p, batch)[0])(params)


@pytest.mark.parametrize(
    ("mesh", "divide_by"), [(js.make_mesh, "active"), (js.virtual_mesh, "initial")]
)
def test_gradients_of_replicas_that_have_data(mesh, divide_by):
    mesh = mesh({"replica": REPLICAS})
    gradients = js.all_reduce_gradients("replica", divide_by=divide_by)
    step = js.make_train_step(loss_fn, optax.sgd(0.1), gradients=gradients, mesh=mesh)
    results = list(js.train_loop(step, step.init(START), js.uneven_batches(DATA, mesh=mesh)))
    params = START
    for t in range(max(COUNTS)):
        grads = [gradient(params, shard[t]) for shard in DATA if t < len(shard)]
        count = len(grads) if divide_by == "active" else REPLICAS
        params = jax.tree.map(lambda p, *g, n=count: p - 0.1 * sum(g) / n, params, *grads)
    for name, value in params.items():
        np.testing.assert_allclose(results[-1].state.params[name], [value] * REPLICAS, rtol=1e-5)
    weights = [np.asarray(r.metrics["weight"]).tolist() for r in results]
    assert weights == [[2, 2, 2, 2], [2, 0, 2, 2], [2, 0, 0, 2]]
    assert results[1].metrics["loss"][1] == 0
    means = js.host_mean(results[1].metrics)
    alive = np.asarray(results[1].metrics["loss"])[[0, 2, 3]]
    assert means["loss"] == pytest.approx(alive.mean())
    assert means["twice"] == pytest.approx(2 * alive.mean())


def test_equal_weights_are_none_and_a_replica_may_have_no_batch():
    mesh = js.virtual_mesh({"replica": 2})
    ((batch, weight),) = js.uneven_batches([[], [np.ones((2, 3))]], mesh=mesh)
    assert batch.shape == (4, 3)
    assert weight.tolist() == [0, 2]
    mean = js.all_reduce_gradients("replica")
    step = js.make_train_step(loss_fn, optax.sgd(0.1), gradients=mean, mesh=mesh)
    batch = np.concatenate(DATA[0][:2])
    ends = [step(step.init(START), batch, weight)[0] for weight in (None, [7, 7])]
    np.testing.assert_allclose(ends[0].params["w"], ends[1].params["w"], rtol=1e-6)
