"""The example of CONTRIBUTING.md: elastic averaging in 25 lines, against NumPy."""

import numpy as np
import optax

import jaxslowmo as js
from support.easgd import easgd

REPLICAS, STEPS, PERIOD, ALPHA, RATE = 4, 7, 3, 0.2, 0.1
START = {"b": np.float32(0.5), "w": np.float32([1, -2, 3])}
BATCHES = np.random.default_rng(0).normal(size=(STEPS, REPLICAS, 3)).astype(np.float32)
WEIGHTS = np.float32([1, 2, 0, 3])  # an idle replica is drawn and does not draw


def loss(params, batch):
    return ((batch @ params["w"] - params["b"]) ** 2).mean()


def by_numpy(steps):
    """`w` and `b` of all replicas in one array, and the centre."""
    x = np.tile(np.append(START["w"], START["b"]).astype(np.float64), (REPLICAS, 1))
    centre, moving = x[0].copy(), (WEIGHTS > 0)[:, None]
    for t in range(1, steps + 1):
        rows = np.concatenate([BATCHES[t - 1], -np.ones((REPLICAS, 1))], axis=1)
        grads = 2 * (rows * x).sum(1, keepdims=True) * rows
        x = x - RATE * np.where(moving, grads, 0)
        if t % PERIOD == 0:
            pull = ALPHA * (x - centre)
            x, centre = x - pull, centre + np.where(moving, pull, 0).sum(0)
    return x, centre


def joined(tree):
    return np.concatenate([tree["w"], np.asarray(tree["b"])[..., None]], axis=-1)


def test_training_steps():
    sync = easgd("replica", sync_every=PERIOD, alpha=ALPHA)
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss, optax.sgd(RATE), sync=sync, mesh=mesh, mode="host")
    state = step.init(START)
    for t, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, batch, weight=WEIGHTS)
        for found, wanted in zip((state.params, state.exchange.shared), by_numpy(t), strict=True):
            np.testing.assert_allclose(joined(found), wanted, rtol=1e-5, atol=1e-6)
    rows = js.comm_report(step, state, batch).select(level="emitted")
    sent = [(row.kind, row.collective, row.count, row.bytes) for row in rows if row.count]
    assert sent == [("elastic", "all-reduce", 1, 16)]
