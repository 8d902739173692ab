"""A window of batches: reduced once, and used up. `test_replica_step.py` has what it computes."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, PARAMS, loss

REPLICAS = 4
ONE, INNER = {"replica": REPLICAS}, {"replica": REPLICAS, "device": 2}
VIRTUAL, average = js.virtual_mesh(ONE), js.all_reduce_gradients("replica")


def sent_by(fn, *arguments):
    """(axis, collective, count, bytes) of what a function sends."""
    rows = js.comm_report(fn, *arguments).select(level="emitted")
    return {(row.axis, row.collective, row.count, row.bytes) for row in rows}


@pytest.mark.parametrize("axes", [ONE, INNER])
def test_a_window_is_reduced_once(axes):
    """As `js.comm_report` tells: nothing between replicas in a batch that is only collected."""
    size, gradients = sum(x.nbytes for x in jax.tree.leaves(PARAMS)), tuple(axes)
    step = js.make_train_step(
        loss, optax.sgd(0.1), gradients=js.all_reduce_gradients(gradients), mesh=js.make_mesh(axes)
    )
    state = step.init(PARAMS)
    window, _ = step.collect(state, BATCHES[0])
    collected = sent_by(step.collect, state, BATCHES[0])
    updated = {(",".join(axes), "all-reduce", 1, size)}
    assert collected == ({("device", "all-reduce", 1, 4)} if "device" in axes else set())
    assert sent_by(step.apply, state, window) == updated
    last = sent_by(lambda s, b, w: step(s, b, window=w), state, BATCHES[0], window)
    assert last == collected | updated


def test_a_window_is_used_up():
    """Its gradients are let go of."""
    step = js.make_train_step(loss, optax.sgd(0.1), gradients=average, mesh=VIRTUAL)
    state = step.init(PARAMS)
    first, _ = step.collect(state, BATCHES[0])
    window, _ = step.collect(state, BATCHES[1], window=first)
    assert np.all(np.asarray(window.count) == 2)
    step.apply(state, window)
    for used in (first, window):
        assert all(x.is_deleted() for x in jax.tree.leaves(used.grads.sum))
        with pytest.raises(ValueError, match="`window`"):
            step.apply(step.init(PARAMS), used)
