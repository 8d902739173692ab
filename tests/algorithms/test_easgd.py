"""The example of CONTRIBUTING.md: elastic averaging in 25 lines, against NumPy."""

import ast

import jax
import numpy as np
import optax

import jaxslowmo as js
from support.easgd import BLOCK, easgd

REPLICAS, STEPS, PERIOD, ALPHA, RATE = 4, 7, 3, 0.2, 0.1
START = {"b": np.float32(0.5), "w": np.float32([1, -2, 3])}
BATCHES = np.random.default_rng(0).normal(size=(STEPS, REPLICAS, 3)).astype(np.float32)
WEIGHTS = np.float32([1, 2, 0, 3])


def loss(params, batch):
    return ((batch @ params["w"] - params["b"]) ** 2).mean()


def by_numpy(steps, moving=(True,) * REPLICAS):
    """`w` and `b` of all replicas in one array, and the centre; replicas that do not move idle."""
    x = np.tile(np.append(START["w"], START["b"]).astype(np.float64), (REPLICAS, 1))
    centre, moving = x[0].copy(), np.array(moving)[:, None]
    for t in range(1, steps + 1):
        rows = np.concatenate([BATCHES[t - 1], -np.ones((REPLICAS, 1))], axis=1)
        grads = 2 * (rows * x).sum(1, keepdims=True) * rows
        x = x - RATE * np.where(moving, grads, 0)
        if t % PERIOD == 0:
            pull = ALPHA * (x - centre)
            x, centre = x - pull, centre + np.where(moving, pull, 0).sum(0)
    return x, centre


def check(params, centre, steps, **options):
    def joined(tree):
        return np.concatenate([tree["w"], np.asarray(tree["b"])[..., None]], axis=-1)

    for found, wanted in zip((params, centre), by_numpy(steps, **options), strict=True):
        np.testing.assert_allclose(joined(found), wanted, rtol=1e-5, atol=1e-6)


def sync():
    return easgd("replica", sync_every=PERIOD, alpha=ALPHA)


def step_of(mesh, mode):
    return js.make_train_step(loss, optax.sgd(RATE), sync=sync(), mesh=mesh, mode=mode)


def test_it_is_short_and_uses_public_names():
    assert len(BLOCK.splitlines()) <= 25
    tree = ast.parse(BLOCK)
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "js"
    }
    assert {"Algorithm", "ParameterTransform", "spec"} <= read <= set(js.__all__)
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any("jaxslowmo" in str(name) for name in imported)


def test_training_steps():
    step = step_of(js.virtual_mesh({"replica": REPLICAS}), "host")
    state = step.init(START)
    for t, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, batch)
        check(state.params, state.exchange.shared, t)
    rows = js.comm_report(step, state, batch).select(level="emitted")
    sent = [(row.kind, row.collective, row.count, row.bytes) for row in rows if row.count]
    assert sent == [("elastic", "all-reduce", 1, 16)]


def test_an_idle_replica_is_drawn_and_does_not_draw(mesh_of):
    step = step_of(mesh_of({"replica": REPLICAS}), "traced")
    state = step.init(START)
    for batch in BATCHES:
        state, _ = step(state, batch, weight=WEIGHTS)
    check(state.params, state.exchange.shared, STEPS, moving=WEIGHTS > 0)


def test_as_the_base_of_slow_momentum_it_keeps_its_centre_whole():
    """So the anchor is whole, too, whatever is asked for."""
    states = []
    for shard_state in (True, False):
        slow = js.slowmo("replica", base=sync(), sync_every=2 * PERIOD, shard_state=shard_state)
        step = js.make_train_step(
            loss, optax.sgd(RATE), sync=slow, mesh=js.virtual_mesh({"replica": REPLICAS})
        )
        state = step.init(START)
        for batch in BATCHES:
            state, _ = step(state, batch)
        states.append(state.params)
        assert state.exchange.shared["base"]["w"].shape == (3,)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)
