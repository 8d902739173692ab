"""The loop and its hooks."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

MESH = js.virtual_mesh({"replica": 2})
BATCHES = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def step():
    return js.make_train_step(
        lambda p, b: (jnp.mean((b @ p["w"]) ** 2), {"mean": b.mean()}),
        optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=MESH,
    )


def start(step):
    return step.init({"w": np.ones(3, np.float32)})


class Note:
    """Writes down when it was called and what the reports held."""

    def __init__(self, name, calls, every):
        self.name, self.calls, self.every = name, calls, every

    def __call__(self, result):
        self.calls.append((self.name, result.step, dict(result.reports)))
        return {self.name: result.step}


def test_results_in_order(step):
    results = []
    for result in js.train_loop(step, start(step), BATCHES):
        assert np.array_equal(result.state.step, [result.step] * 2)
        assert result.metrics["loss"].shape == (2,)
        results.append((result.step, result.phase))
    assert results == [(t, ("average",) if t % 2 == 0 else ()) for t in range(1, 7)]


def test_hooks_run_in_order_before_the_yield(step):
    calls = []
    hooks = (
        Note("a", calls, every=2),
        Note("b", calls, every=js.every(3, start=1, before="all")),
    )
    reports = [
        (r.step, dict(r.reports)) for r in js.train_loop(step, start(step), BATCHES, hooks=hooks)
    ]
    assert calls == [("b", 1, {}), ("a", 2, {}), ("a", 4, {}), ("b", 4, {"a": 4}), ("a", 6, {})]
    assert reports == [
        (1, {"b": 1}),
        (2, {"a": 2}),
        (3, {}),
        (4, {"a": 4, "b": 4}),
        (5, {}),
        (6, {"a": 6}),
    ]


def test_stopping_early_runs_no_further_step(step):
    taken = []

    def batches():
        for i, batch in enumerate(BATCHES):
            taken.append(i)
            yield batch

    for result in js.train_loop(step, start(step), batches()):
        if result.step == 3:
            break
    assert taken == [0, 1, 2]
    assert np.array_equal(result.state.step, [3, 3])
    again = next(iter(js.train_loop(step, result.state, BATCHES)))
    assert np.array_equal(again.state.step, [4, 4])
    assert (again.step, again.phase) == (1, ("average",))


def test_num_steps_takes_no_batch_too_many(step):
    batches = iter(BATCHES)
    results = list(js.train_loop(step, start(step), batches, num_steps=2))
    assert [r.step for r in results] == [1, 2]
    assert len(list(batches)) == 4
    assert list(js.train_loop(step, start(step), BATCHES, num_steps=0)) == []


def test_batches_that_end_early(step):
    loop = js.train_loop(step, start(step), BATCHES[:2], num_steps=3)
    assert [next(loop).step, next(loop).step] == [1, 2]
    with pytest.raises(ValueError, match=r"`batches` ended after 2 of `num_steps`=3 steps"):
        next(loop)


def test_negative_num_steps_at_the_call(step):
    with pytest.raises(ValueError, match=r"`num_steps` must be >= 0, got -1"):
        js.train_loop(step, start(step), BATCHES, num_steps=-1)


def test_hook_with_a_period_below_one(step):
    hooks = (js.Log(print, every=0),)
    with pytest.raises(ValueError, match=r"`every` .* >= 1, got 0"):
        next(js.train_loop(step, start(step), BATCHES, hooks=hooks))


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
    np.testing.assert_allclose(seen[0], exact, rtol=1e-5)
    np.testing.assert_allclose(seen[1], np.asarray(result.state.params["w"]).mean(0), rtol=1e-6)
    assert np.abs(seen[1] - exact).max() > 1e-3


def test_evaluation_with_a_transform_that_counts_replicas_alike(step):
    seen = []

    def evaluate(params, model_state):
        seen.append(np.asarray(params["w"]))
        return {}

    hooks = [js.Evaluate(evaluate, mesh=MESH, every=3, sync=sync) for sync in (step.sync, None)]
    list(js.train_loop(step, start(step), BATCHES[:3], hooks=hooks))
    assert np.array_equal(*seen)
