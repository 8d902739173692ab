"""Gradients, losses and metrics of an update are the weighted means over all of its examples.

The loss is linear, so that NumPy knows all of them from the examples alone.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import covering

REPLICAS, PARTS, ROWS, SIZE = 3, 2, 2, 4  # PARTS: microbatches
OPTIONS = {
    "pairs": [False, True],
    "accumulate": [1, PARTS],
    "batches": [1, 2, 4],
    "weighted": [False, True],
    "reduced": [False, True],  # gradients, over all replicas
    "devices": [1, 2],
    "named": [True, False],  # whether a loss sees the examples of one device, or of the replica
    "dtypes": [("float32",), ("float16", "float32"), ("bfloat16",), ("bfloat16", "float32")],
    "kind": ["virtual", "devices"],
}
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
START = np.array([0.5, -0.25, 1.0, 0.75])
# Of each batch and replica; replica 1 begins idle, and replica 2 always is.
WEIGHTS = np.float32([[2, 0, 0], [0, 3, 0], [1, 5, 0], [257, 1, 0]])


def fn(params, batch, *, pairs):
    x, mask = batch
    whole = sum(p.astype(jnp.float32) for p in params)
    first = x[0, 0].astype(jnp.complex64) * jnp.complex64(1 + 2j)
    metrics = {"first": first, "marked": mask.sum().astype(jnp.int32), "positive": x[0, 0] > 0}
    values = x @ whole
    return ((values * mask).sum(), mask.sum()) if pairs else values.mean(), metrics


def examples(run, seed):
    """x (batches, replicas, devices, microbatches, rows, size), and a mask of the rows."""
    source = np.random.default_rng(seed)
    shape = run["batches"], REPLICAS, run["devices"], run["accumulate"], ROWS
    mask = (source.random(shape) < 0.6).astype(np.float32)
    mask[:, :, 0, 0, 0] = 1
    return source.normal(size=(*shape, SIZE)).astype(np.float32), mask


def gradient(run, x, mask, replicas, batches):
    """The gradient of the loss of these replicas over these batches, and its weight."""
    grads, whole = np.zeros(SIZE), 0.0
    for i, r in itertools.product(batches, replicas):
        weight = float(WEIGHTS[i, r]) if run["weighted"] else 1.0
        each, marks = x[i, r].astype(np.float64), mask[i, r].astype(np.float64)
        if run["pairs"] and weight:
            grads += (each * marks[..., None]).sum((0, 1, 2))
            whole += marks.sum()
        elif weight:
            grads += weight * each.mean((0, 1, 2))
            whole += weight
    return grads / (whole or 1.0), whole


def expected_metrics(run, x, mask, replica, batches):
    others, whole = np.zeros(3, complex), 0.0
    for i in batches:
        weight = float(WEIGHTS[i, replica]) if run["weighted"] else 1.0
        first, marks = x[i, replica, :, :, 0, 0].astype(np.float64), mask[i, replica].sum(2)
        if not run["named"]:
            first, marks = first[0], mask[i, replica].sum((0, 2))
        if weight:
            means = [first.mean() * (1 + 2j), marks.mean(), (first > 0).mean()]
            others += weight * np.array(means)
            whole += weight
    others /= whole or 1.0
    grads, of_grads = gradient(run, x, mask, [replica], batches)
    metrics = {"loss": len(run["dtypes"]) * START @ grads} | dict(
        zip(("first", "marked", "positive"), others, strict=True)
    )
    if run["weighted"]:
        metrics["weight"] = whole
    if run["pairs"]:
        metrics["loss_weight"] = of_grads
    return metrics


def check(run, x, mask, params, metrics, of_metrics, case):
    for r in range(REPLICAS):
        replicas = range(REPLICAS) if run["reduced"] else [r]
        grads, _ = gradient(run, x, mask, replicas, range(run["batches"]))
        for p, dtype in zip(params, run["dtypes"], strict=True):
            assert p.dtype == dtype
            found, atol = START - np.asarray(p[r]).astype(np.float64), TOLERANCE[dtype]
            np.testing.assert_allclose(found, grads, atol=atol, err_msg=f"{case}, replica {r}")
        wanted = expected_metrics(run, x, mask, r, of_metrics)
        assert set(metrics) == set(wanted)
        for name, value in wanted.items():
            found, message = np.asarray(metrics[name][r]), f"{case}, replica {r}, {name}"
            np.testing.assert_allclose(found, value, rtol=2e-6, atol=2e-6, err_msg=message)


@pytest.mark.parametrize("run", covering(OPTIONS, 8, seed=1), ids=str)
def test_as_numpy(run):
    make = js.virtual_mesh if run["kind"] == "virtual" else js.make_mesh
    if run["devices"] * REPLICAS > len(jax.devices()):
        make = js.virtual_mesh
    over = ("replica",) * run["reduced"] + ("device",) * (run["named"] and run["devices"] > 1)
    step = js.make_train_step(
        lambda params, batch: fn(params, batch, pairs=run["pairs"]),
        optax.sgd(1.0),
        sync=None if run["reduced"] else "none",
        gradients=js.all_reduce_gradients(over, divide_by="active") if over else None,
        mesh=make({"replica": REPLICAS, "device": run["devices"]}),
        accumulate=run["accumulate"],
        donate=False,
    )
    state = step.init(tuple(np.asarray(START).astype(jnp.dtype(d)) for d in run["dtypes"]))
    x, mask = examples(run, seed=run["batches"])
    given, weights = x.copy(), [None] * run["batches"]
    if run["weighted"]:
        weights = list(WEIGHTS[: run["batches"]])
        given[WEIGHTS[: run["batches"]] == 0] = np.nan
    batches = [(a.reshape(-1, SIZE), b.reshape(-1)) for a, b in zip(given, mask, strict=True)]

    def collected(count):
        window = None
        for batch, weight in zip(batches[:count], weights[:count], strict=True):
            window, _ = step.collect(state, batch, weight, window=window)
        return window

    everything = range(run["batches"])
    case = "the last batch with the window"
    new, metrics = step(state, batches[-1], weights[-1], window=collected(len(batches) - 1))
    check(run, x, mask, new.params, metrics, everything[-1:], case)
    new, metrics = step.apply(state, collected(len(batches)))
    check(run, x, mask, new.params, metrics, everything, "the window alone")
    if run["weighted"]:
        batches = [js.train.WeightedBatch(*both) for both in zip(batches, weights, strict=True)]
    (result,) = js.train_loop(step, state, batches, accumulate=len(batches))
    check(run, x, mask, result.state.params, result.metrics, everything, "the loop")
