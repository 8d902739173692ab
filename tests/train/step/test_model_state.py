"""Model state and metrics: means inside a replica, and exchanges that follow the parameters'."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import train

BATCHES = np.random.default_rng(0).normal(size=(3, 16, 3)).astype(np.float32)
VIRTUAL = js.virtual_mesh({"replica": 4})
START = {"mean": np.zeros(3, np.float32), "n": np.int32(0)}
local = js.local_sgd("replica", sync_every=1)


def loss(params, batch, *, model_state):
    """Statistics and metrics of every type, of which counts differ between replicas."""
    positive = jnp.sum(batch > 0)
    metrics = {"mean": batch.mean(), "positive": positive, "rate": 0.1, "finite": batch.min() < 9}
    new = {"mean": 0.5 * model_state["mean"] + batch.mean(0), "n": model_state["n"] + positive}
    return jnp.sum(params["w"] * batch.mean(0)), (metrics, new)


def step_of(sync=local, mesh=VIRTUAL, fn=loss, **options):
    return js.make_train_step(fn, optax.sgd(0.1), sync=sync, mesh=mesh, donate=False, **options)


def started(step, start=START):
    return step.init({"w": np.ones(3, np.float32)}, model_state=start)


def rows(*values):
    """Return a batch of one example per replica, all of whose features are its value."""
    return np.repeat(np.float32(values)[:, None], 3, axis=1)


def test_metrics_are_means_and_counters_those_of_the_first_device():
    """Of metrics of every type, over the devices and microbatches of a replica."""
    mesh, replicas = js.make_mesh({"replica": 2, "device": 2}), 2
    each = {"gradients": js.all_reduce_gradients("device"), "accumulate": 2}
    step = step_of(mesh=mesh, **each)
    state, metrics = train(step, started(step), BATCHES)
    parts = BATCHES.reshape(3, replicas, 2, 2, -1, 3)
    positive = (parts > 0).sum((-1, -2))
    np.testing.assert_array_equal(state.model_state["n"], positive[:, :, 0].sum((0, 2)))
    np.testing.assert_allclose(metrics["positive"], positive[-1].mean((1, 2)))
    np.testing.assert_allclose(metrics["mean"], parts[-1].mean((1, 2, 3, 4)), atol=1e-6)
    np.testing.assert_allclose(metrics["rate"], [0.1] * replicas)
    np.testing.assert_array_equal(metrics["finite"], [1] * replicas)


def test_gossip_sends_it_to_the_same_peers():
    """No all-reduce in any step; statistics go with the parameters, and are mixed at once."""
    graph = js.topology.directed_exponential(4)
    sync, mesh = js.sgp("replica", graph=graph, overlap=2), js.make_mesh({"replica": 4})
    step = step_of(sync, mesh, mode="host")
    state, seen = started(step), []
    for batch in (rows(1, 2, 3, 6), *[rows(0, 0, 0, 0)] * 2):
        state, _ = step(state, batch)
        seen.append(np.asarray(state.model_state["mean"]))
    report = js.comm_report(step, state, jax.ShapeDtypeStruct((4, 3), jnp.float32))
    sent = report.select(level="emitted")
    assert {row.content for row in sent} == {"parameters", "statistics"}
    assert {row.collective for row in sent} == {"collective-permute"}
    # With late arrivals, push-sum weights move, alike on all nodes of this graph.
    assert {report.bytes(kind=row.kind) for row in sent} == {24}
    before = np.float64([2, 4, 6, 12])  # halved by the loss
    for t, found in enumerate(seen):
        before = before / 2
        expected = before / 2
        for node, (peer,) in enumerate(graph.out_peers(t)):
            expected[peer] += before[node] / 2
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)
        before = expected


FORMS = {
    "metrics alone": lambda value, new: (value, {"a": 1.0}),
    "in the other order": lambda value, new: (value, (new, {"a": 1.0})),
    "nothing": lambda value, new: (value, ({}, None)),
    "a part": lambda value, new: (value, ({}, {"n": new["n"]})),
    "a number of a vector": lambda value, new: (value, ({}, {**new, "mean": new["mean"][0]})),
}


@pytest.mark.parametrize("method", ["__call__", "evaluate", "collect"])
def test_model_state_that_a_loss_does_not_return_is_refused_by_name(method):
    """It would stay as it was, and models of BatchNorm would be evaluated with its first values."""
    for form in FORMS.values():

        def fn(params, batch, *, form=form, **given):
            value, (_, new) = loss(params, batch, model_state=given["model_state"])
            return form(value, new)

        step = step_of(fn=fn)
        with pytest.raises(ValueError, match=r"`loss_fn` must return .*model.state"):
            getattr(step, method)(started(step), rows(*range(8)))


def test_model_state_keeps_containers_and_dtypes():
    """If dtypes or containers changed, the next update would be another program."""

    def fn(params, batch, *, model_state):
        value, (metrics, new) = loss(params, batch, model_state=model_state)
        return value, (metrics, {**new, "mean": new["mean"].astype(jnp.bfloat16)})

    step = step_of(fn=fn)
    before = started(step, OrderedDict(START))
    state, _ = step(before, rows(1, 2, 3, 6))
    assert jax.tree.structure(state.model_state) == jax.tree.structure(before.model_state)
    assert state.model_state["mean"].dtype == jnp.float32


def test_model_state_that_was_forgotten_is_named():
    """The error names it, or a note on the error that the loss itself meets."""
    returns = lambda p, b, **_: (jnp.sum(p["w"]), ({}, {"s": b.mean()}))  # noqa: E731
    step = step_of(fn=returns)
    with pytest.raises(ValueError, match=r"\['s'\], and was given none: .*model_state="):
        step(step.init({"w": np.ones(3, np.float32)}), rows(1, 2, 3, 4))
    step = step_of()
    with pytest.raises(KeyError) as error:
        step(step.init({"w": np.ones(3, np.float32)}), rows(1, 2, 3, 4))
    assert any("model_state=" in note for note in error.value.__notes__)
