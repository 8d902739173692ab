"""Losses that are pairs `(sum, weight)`; `update/test_replica_step.py` has what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step import tables
from train.step.problem import BATCHES, PARAMS

RATE = 0.3
# Two examples of each replica, of which the first has none that counts.
BATCH = {"x": BATCHES[0, :8], "mask": np.float32([0, 0, 1, 0, 1, 1, 0, 1])}


def scores(params, batch):
    return jnp.sum(jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) ** 2, axis=1)


def terms(params, batch):
    return (scores(params, batch) * batch["mask"]).sum(), batch["mask"].sum()


def quotient(params, batch):
    total, weight = terms(params, batch)
    return total / weight


def reducing(loss=terms, mesh=None, **options):
    mesh = js.virtual_mesh({"replica": 4}) if mesh is None else mesh
    gradients = js.all_reduce_gradients("replica", **options)
    return js.make_train_step(loss, optax.sgd(RATE), gradients=gradients, mesh=mesh, donate=False)


def test_replicas_without_tokens_count_for_nothing_and_all_without_stay():
    step = reducing()
    state, _ = step(step.init(PARAMS), BATCH)
    grads = jax.grad(quotient)(PARAMS, BATCH)
    for name, found in state.params.items():
        wanted = PARAMS[name] - RATE * grads[name]
        np.testing.assert_allclose(found[0], wanted, rtol=2e-5, atol=2e-6)
    after, metrics = step(state, {**BATCH, "mask": np.zeros(8, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert not np.any(metrics["loss"])


def test_the_weight_joins_the_gradients_all_reduce():
    for loss in (terms, quotient):
        step = reducing(loss, js.make_mesh({"replica": 2}))
        report = js.comm_report(step, step.init(PARAMS), BATCH)
        rows = report.select(level="compiled")
        assert [(row.collective, row.count) for row in rows] == [("all-reduce", 1)]


def test_what_is_no_pair_of_scalars_is_refused():
    pair = lambda params, batch, *, embedded: (1.0, 1.0)  # noqa: E731
    step = tables.step_of(1, loss_fn=pair, gradients=js.all_reduce_gradients("replica"))
    with pytest.raises(ValueError, match="`loss_fn` with `embeddings`"):
        step(step.init(tables.DENSE), tables.batches(1)[0])
    step = reducing(lambda p, b: (terms(p, b)[0], b["mask"]))
    with pytest.raises(ValueError, match="`loss_fn`"):
        step(step.init(PARAMS), BATCH)


def with_accuracy(params, batch):
    return quotient(params, batch), (scores(params, batch) < 1).mean()


def in_a_loop(params, batch):
    """The weight is summed beside the loss, which depends on the parameters."""

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, terms(params, part)), None

    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    return jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), parts)[0]


def test_a_metric_that_is_taken_for_a_weight_is_told():
    """The loss would be divided by it, and no gradient would say so."""
    for fn in (with_accuracy, jax.jit(with_accuracy), in_a_loop):
        step = reducing(fn)
        state = step.init(PARAMS)
        if fn is not in_a_loop:
            with pytest.warns(UserWarning, match="`loss_fn` .* depends on the parameters"):
                state, _ = step(state, BATCH)
        step(state, BATCH)  # warnings are errors
    model = js.LayeredModel([lambda p, x: x["x"] @ p], lambda y, b: (y.mean(), (y < 1).mean()))
    with pytest.warns(UserWarning, match="`loss` .* depends on the parameters"):
        model([PARAMS["w"]], BATCH)
