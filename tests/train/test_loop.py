"""`js.train_loop`: the order of results, where it ends, and hooks: the log, the evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.small_loop import BATCHES, Note, make_step, start

step = make_step()


def test_results_and_hooks_come_in_the_order_of_steps():
    """Each hook when it is due, in the order given, before the result is yielded."""
    calls, found = [], []
    second = Note("b", calls, every=js.every(3, start=1, before="all"))
    for result in js.train_loop(
        step, start(step), BATCHES, hooks=(Note("a", calls, every=2), second)
    ):
        assert np.array_equal(result.state.step, [result.step] * 2)
        assert result.metrics["loss"].shape == (2,)
        found.append((result.step, result.phase, dict(result.reports)))
    assert calls == [("b", 1, {}), ("a", 2, {}), ("a", 4, {}), ("b", 4, {"a": 4}), ("a", 6, {})]
    average = ("average",)
    assert found == [
        (1, (), {"b": 1}),
        (2, average, {"a": 2}),
        (3, (), {}),
        (4, average, {"a": 4, "b": 4}),
        (5, (), {}),
        (6, average, {"a": 6}),
    ]


def test_num_steps_is_the_number_of_the_last_step():
    batches = iter(BATCHES)
    assert [r.step for r in js.train_loop(step, start(step), batches, num_steps=2)] == [1, 2]
    assert len(list(batches)) == 4
    assert list(js.train_loop(step, start(step), BATCHES, num_steps=0)) == []
    with pytest.raises(ValueError, match="after 6 of `num_steps`=9"):
        list(js.train_loop(step, start(step), BATCHES, num_steps=9))
    _, last = js.train_loop(step, start(step), BATCHES, num_steps=2)
    with pytest.warns(UserWarning, match=r"has done 2 .*`num_steps`=2 "):
        assert list(js.train_loop(step, last.state, BATCHES, num_steps=2)) == []
    loop = js.train_loop(step, last.state, BATCHES, num_steps=np.array(4))
    steps = [result.step for result in loop]
    assert (steps, {type(x) for x in steps}) == ([3, 4], {int})


WEIGHTS = np.array([1, 2, 3, 0], np.float32)
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(4, 3)).astype(np.float32)
TABLES = RNG.normal(size=(4, 2, 6)).astype(np.float32)


def test_mean_over_replicas_of_any_shape(mesh_of):
    mesh = mesh_of({"replica": 4, "device": 2})
    lies = NamedSharding(mesh, P("replica", "device"))
    metrics = {"loss": jnp.asarray(VECTORS[:, 0]), "tables": jax.device_put(TABLES, lies)}
    found = js.host_mean(metrics | {"empty": jnp.zeros((4, 2, 0))})
    assert type(found["loss"]) is float
    np.testing.assert_allclose(found["loss"], VECTORS[:, 0].mean(), rtol=1e-6)
    assert found["tables"].dtype == np.float64
    assert found["empty"].shape == (2, 0)
    np.testing.assert_allclose(found["tables"], TABLES.astype(np.float64).mean(0))
    values = jnp.array([[0, 1], [1, 1], [0, 1], [np.nan, 0]])  # the last has weight 0
    given = {"each": values, "is": values > 0, "one": values[:, 0]}
    found = js.host_mean(given | {"weight": jnp.asarray(WEIGHTS)})
    np.testing.assert_allclose(found["each"], [2 / 6, 1])
    np.testing.assert_allclose(found["is"], [2 / 6, 1])
    assert found["one"] == pytest.approx(2 / 6)
    assert found["weight"] == 1.5  # the mean weight, not weighted itself
    idle = js.host_mean({"v": jnp.ones((2, 3)), "weight": jnp.zeros(2)})
    np.testing.assert_array_equal(idle["v"], np.ones(3))


def test_the_log_writes_means_of_vectors_too_and_earlier_reports(mesh_of):
    step = js.make_train_step(
        lambda params, batch: (jnp.mean((batch @ params["w"]) ** 2), {"batch": batch[0]}),
        optax.sgd(0.1),
        sync=js.local_sgd("replica"),
        mesh=mesh_of({"replica": 4}),
    )
    written = []
    hooks = (Note("note", [], every=2), js.train.Log(written.append, every=2))
    *_, result = js.train_loop(step, start(step), [2 * VECTORS, VECTORS], hooks=hooks)
    (record,) = written
    assert record.keys() == {"step", "loss", "batch", "note"}
    assert (record["step"], record["note"]) == (2, 2)
    assert record["loss"] == pytest.approx(np.mean(result.metrics["loss"]))
    np.testing.assert_allclose(record["batch"], VECTORS.mean(0), rtol=1e-6)
    _, metrics = step(result.state, VECTORS, WEIGHTS)
    weighted = np.average(VECTORS, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(js.host_mean(metrics)["batch"], weighted, rtol=1e-6)


def test_evaluation_sees_the_consensus_which_weighs_the_replicas():
    """After a few steps a part of the parameters is on its way."""
    mesh = js.virtual_mesh({"replica": 4})
    step = js.make_train_step(
        lambda p, b: jnp.vdot(p["w"], b.mean(0)),  # the gradient is the mean of the batch
        optax.sgd(0.1),
        sync=js.sgp("replica", overlap=3),
        mesh=mesh,
    )
    seen = []
    evaluate = lambda params, _: seen.append(np.asarray(params["w"])) or {"eval": 1.0}  # noqa: E731
    hooks = [
        js.train.Evaluate(evaluate, mesh=mesh, every=6, sync=sync) for sync in (step.sync, None)
    ]
    *_, result = js.train_loop(step, start(step), BATCHES, hooks=hooks)
    assert result.reports == {"eval": 1.0}
    exact = 1 - 0.1 * BATCHES.mean(1).sum(0)
    assert np.abs(np.asarray(result.state.params["w"]).mean(0) - exact).max() > 1e-3
    for found in (*seen, step.consensus(result.state)["w"]):
        np.testing.assert_allclose(found, exact, rtol=1e-5)
