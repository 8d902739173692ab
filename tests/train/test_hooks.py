"""Hooks: metrics of any kind as means on the host, the log, the evaluated consensus."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.small_loop import BATCHES, MESH, Note, make_step, start

WEIGHTS = np.array([1, 2, 3, 0], np.float32)
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(4, 3)).astype(np.float32)
TABLES = RNG.normal(size=(4, 2, 6)).astype(np.float32)


@pytest.mark.parametrize(
    "spec", [None, P(), P("replica"), P("replica", "device"), P(None, "device"), P("device")]
)
def test_mean_over_replicas_of_any_shape(mesh_of, spec):
    mesh = mesh_of({"replica": 4, "device": 2})

    def placed(x):
        if spec is None:
            return jnp.asarray(x)
        return jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim])))

    found = js.host_mean(
        {"loss": placed(VECTORS[:, 0]), "tables": placed(TABLES), "empty": placed(TABLES[:, :, :0])}
    )
    assert type(found["loss"]) is float
    np.testing.assert_allclose(found["loss"], VECTORS[:, 0].mean(), rtol=1e-6)
    assert isinstance(found["tables"], np.ndarray)
    assert found["tables"].dtype == np.float64
    assert found["empty"].shape == (2, 0)
    np.testing.assert_allclose(found["tables"], TABLES.astype(np.float64).mean(0))


def of_process(array, shards):
    """`array` as a process sees it that holds some of its shards."""
    return SimpleNamespace(
        shape=array.shape,
        ndim=array.ndim,
        sharding=array.sharding,
        addressable_shards=[array.addressable_shards[i] for i in shards],
    )


def test_mean_over_the_replicas_of_one_process(mesh_of):
    mesh = mesh_of({"replica": 4, "device": 2})
    loss = jax.device_put(VECTORS[:, 0], NamedSharding(mesh, P("replica")))
    tables = jax.device_put(TABLES, NamedSharding(mesh, P("replica", "device")))
    here = [7, 3, 2, 6]  # the two devices of replicas 1 and 3
    found = js.host_mean({"loss": of_process(loss, here), "tables": of_process(tables, here)})
    assert found["loss"] == pytest.approx(VECTORS[[1, 3], 0].mean())
    np.testing.assert_allclose(found["tables"], TABLES[[1, 3]].astype(np.float64).mean(0))
    message = r"`metrics` must hold whole replicas on each process, and 'tables' is split"
    with pytest.raises(ValueError, match=message):
        js.host_mean({"tables": of_process(tables, [0, 1, 2])})


def test_weighted_and_without_replicas_of_weight_0():
    """What a replica without data holds does not matter, be it NaN."""
    losses = np.array([1, 2, 4, np.nan], np.float32)
    vectors = VECTORS.copy()
    vectors[3] = [np.nan, np.inf, 0]
    found = js.host_mean(
        {"loss": jnp.asarray(losses), "v": jnp.asarray(vectors), "weight": jnp.asarray(WEIGHTS)}
    )
    assert found["loss"] == pytest.approx((1 + 4 + 12) / 6)
    np.testing.assert_allclose(found["v"], (WEIGHTS[:3, None] / 6 * VECTORS[:3]).sum(0), rtol=1e-6)
    assert found["weight"] == 1.5  # the mean weight, not weighted itself


def test_where_no_replica_has_data_the_mean_is_plain():
    found = js.host_mean({"v": jnp.ones((2, 3)), "weight": jnp.zeros(2)})
    assert np.array_equal(found["v"], np.ones(3))
    assert found["weight"] == 0.0


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "bfloat16", "float16"])
def test_dtypes(dtype):
    values = np.array([[0, 1], [1, 1], [0, 1], [0, 0]])
    metric = jnp.asarray(values).astype(dtype)
    found = js.host_mean({"each": metric, "one": metric[:, 0], "weight": jnp.asarray(WEIGHTS)})
    np.testing.assert_allclose(found["each"], [2 / 6, 1])
    assert type(found["one"]) is float
    assert found["one"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("virtual", [True, False])
def test_vector_metrics_of_a_step_reach_the_log(mesh_of, virtual):
    axes = {"replica": 4}
    mesh = js.virtual_mesh(axes) if virtual else mesh_of(axes)
    step = js.make_train_step(
        lambda params, batch: (jnp.mean((batch @ params["w"]) ** 2), {"batch": batch[0]}),
        optax.sgd(0.1),
        sync=js.local_sgd("replica"),
        mesh=mesh,
    )
    written = []
    hooks = (js.Log(written.append, every=1),)
    state = step.init({"w": np.ones(3, np.float32)})
    (result,) = js.train_loop(step, state, [VECTORS], hooks=hooks)
    (record,) = written
    assert type(record["loss"]) is float
    np.testing.assert_allclose(record["batch"], VECTORS.mean(0), rtol=1e-6)
    _, metrics = step(result.state, VECTORS, WEIGHTS)
    weighted = np.average(VECTORS, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(js.host_mean(metrics)["batch"], weighted, rtol=1e-6)


@pytest.fixture(scope="module")
def step():
    return make_step()


def test_log_writes_means_and_earlier_reports(step):
    written, calls = [], []
    hooks = (Note("note", calls, every=2), js.Log(written.append, every=2))
    for result in js.train_loop(step, start(step), BATCHES[:2], hooks=hooks):
        metrics = {k: np.asarray(v).mean() for k, v in result.metrics.items()}
    (record,) = written
    assert set(record) == {"step", "loss", "mean", "note"}
    assert (record["step"], record["note"]) == (2, 2)
    np.testing.assert_allclose(
        [record["loss"], record["mean"]], list(map(metrics.get, ["loss", "mean"]))
    )


@pytest.mark.parametrize("mesh", [MESH, {"replica": 2, "device": 2}], ids=["virtual", "mesh"])
def test_evaluation_sees_the_consensus(mesh):
    mesh = js.make_mesh(mesh) if isinstance(mesh, dict) else mesh
    step = js.make_train_step(
        lambda p, b, *, model_state: (jnp.mean((b @ p["w"]) ** 2), ({}, {"s": b.mean()})),
        optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=10),
        mesh=mesh,
    )
    seen = []

    def evaluate(params, model_state):
        seen.append((np.asarray(params["w"]), np.asarray(model_state["s"])))
        return {"eval": 1.0}

    hooks = (js.Evaluate(evaluate, mesh=mesh, every=3),)
    state = step.init({"w": np.ones(3, np.float32)}, model_state={"s": np.float32(0)})
    *_, result = js.train_loop(step, state, BATCHES[:3], hooks=hooks)
    ((w, s),) = seen
    stacked = np.asarray(result.state.params["w"])
    assert not np.array_equal(stacked[0], stacked[1])
    np.testing.assert_allclose(w, stacked.mean(0), atol=1e-7)
    np.testing.assert_allclose(s, np.asarray(result.state.model_state["s"]).mean(), atol=1e-7)
    assert result.reports == {"eval": 1.0}


def test_evaluation_of_gossip_weighs_the_replicas():
    """After a few steps a part of the parameters is on its way."""
    mesh = js.virtual_mesh({"replica": 4})
    step = js.make_train_step(
        lambda p, b: jnp.vdot(p["w"], b.mean(0)),  # the gradient is the mean of the batch
        optax.sgd(0.1),
        sync=js.sgp("replica", overlap=3),
        mesh=mesh,
    )
    seen = []

    def evaluate(params, model_state):
        assert model_state == {}
        seen.append(np.asarray(params["w"]))
        return {}

    hooks = [js.Evaluate(evaluate, mesh=mesh, every=6, sync=sync) for sync in (step.sync, None)]
    *_, result = js.train_loop(step, start(step), BATCHES, hooks=hooks)
    exact = 1 - 0.1 * BATCHES.mean(1).sum(0)
    assert np.abs(np.asarray(result.state.params["w"]).mean(0) - exact).max() > 1e-3
    for one in seen:  # the state tells, whether the transform is given or not
        np.testing.assert_allclose(one, exact, rtol=1e-5)


def test_evaluation_with_a_transform_that_counts_replicas_alike(step):
    seen = []

    def evaluate(params, model_state):
        seen.append(np.asarray(params["w"]))
        return {}

    hooks = [js.Evaluate(evaluate, mesh=MESH, every=3, sync=sync) for sync in (step.sync, None)]
    list(js.train_loop(step, start(step), BATCHES[:3], hooks=hooks))
    assert np.array_equal(*seen)
