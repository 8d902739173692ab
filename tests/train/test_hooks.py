"""Metrics on the host: the mean over replicas, whatever their shape, dtype and placement."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

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
