"""Several replicas on each of several devices train as one replica on each, and lie there."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.libraries import PARAMS, PARTS, WIDTH, assert_close, loss_fn, start, stepped

REPLICAS, UPDATES = 8, 4
SHAPE = 3 * UPDATES, 2 * REPLICAS, WIDTH
BATCHES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
ALGORITHMS = {
    "local_sgd": {"sync": js.local_sgd("replica", sync_every=2)},
    "slowmo": {
        "sync": js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=UPDATES)
    },
    "sgp": {"sync": js.sgp("replica")},
    "demo": {
        "sync": js.local_sgd("replica", sync_every=2),
        "gradients": js.demo("replica", top_k=2, chunk=4),
    },
}


PARAMS_OF = {"make_train_step": lambda s: s.params, "with_exchange": lambda s: s.state["params"]}


def made(door, algorithm, mesh, **options):
    """Return a step and its first state."""
    options |= {"mesh": mesh, **ALGORITHMS[algorithm]}
    if door == "make_train_step":
        step = js.make_train_step(loss_fn, OPTIMIZER, **options)
        return step, step.init(PARAMS)
    step = js.with_exchange(functools.partial(stepped, optimizer=OPTIMIZER), **PARTS, **options)
    return step, step.init(start(PARAMS, OPTIMIZER))


@functools.cache
def on_a_device_each(algorithm):
    """Return the parameters after a period, and the consensus after all batches."""
    step, state = made("make_train_step", algorithm, js.make_mesh({"replica": REPLICAS}))
    params = None
    for t, batch in enumerate(BATCHES):
        params = jax.device_get(state.params) if t == UPDATES else params
        state, _ = step(state, batch)
    return params, jax.device_get(step.consensus(state))


def assert_lies_on(state, params, count):
    """Assert that each leaf is on the first devices, of which each holds its replicas alone."""
    for x in jax.tree.leaves(state):
        assert x.committed
        assert x.sharding.device_set == set(jax.devices()[:count])
    for x in jax.tree.leaves(params):
        assert x.sharding.shard_shape(x.shape) == (REPLICAS // count, *x.shape[1:])


# Each number of devices, door and mode meets most algorithms.
CASES = [
    ("local_sgd", "make_train_step", "traced", 2),
    ("slowmo", "with_exchange", "host", 4),
    ("sgp", "make_train_step", "host", 1),
    ("sgp", "with_exchange", "traced", 8),
    ("demo", "make_train_step", "host", 4),
]


@pytest.mark.parametrize(("algorithm", "door", "mode", "count"), CASES)
def test_they_train_as_on_a_device_each(algorithm, door, mode, count, compilations):
    mesh, params_of = js.virtual_mesh({"replica": REPLICAS}, jax.devices()[:count]), PARAMS_OF[door]
    expected, consensus = on_a_device_each(algorithm)
    step, state = made(door, algorithm, mesh, mode=mode)
    assert_lies_on(state, params_of(state), count)
    for batch in BATCHES[:UPDATES]:
        state, _ = step(state, batch)
    assert_lies_on(state, params_of(state), count)
    assert_close(params_of(state), expected)
    before = compilations.count
    for batch in BATCHES[UPDATES : 2 * UPDATES]:
        state, _ = step(state, batch)
    assert compilations.count == before
    state, _ = step.scan(state, BATCHES[2 * UPDATES :])
    assert_lies_on(state, params_of(state), count)
    assert_close(step.consensus(state), consensus)
