"""The example of CONTRIBUTING.md: elastic averaging in 60 lines, against NumPy."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints
from support.easgd import BLOCK, EASGDState, easgd

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
        return np.concatenate([tree["w"], np.asarray(tree["b"])[:, None]], axis=1)

    wanted = by_numpy(steps, **options)
    np.testing.assert_allclose(joined(params), wanted[0], rtol=1e-5, atol=1e-6)
    centres = joined(centre)
    np.testing.assert_allclose(centres[0], wanted[1], rtol=1e-5, atol=1e-6)
    assert np.array_equal(centres, np.tile(centres[0], (REPLICAS, 1)))


def sync():
    return easgd("replica", sync_every=PERIOD, alpha=ALPHA)


def step_of(mesh, mode, replicas=REPLICAS):
    return js.make_train_step(loss, optax.sgd(RATE), sync=sync(), mesh=mesh, mode=mode)


def test_it_is_short_and_uses_public_names():
    assert len(BLOCK.splitlines()) <= 60
    tree = ast.parse(BLOCK)
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "js"
    }
    assert read <= set(js.__all__)
    assert {"TransformSpec", "ScheduleSpec", "ExchangeSpec", "parameter_transform"} <= read
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any("jaxslowmo" in str(name) for name in imported)


@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("kind", ["mesh", "virtual"])
def test_training_steps(kind, mode, mesh_of):
    axes = {"replica": REPLICAS}
    step = step_of(mesh_of(axes) if kind == "mesh" else js.virtual_mesh(axes), mode)
    state = step.init(START)
    for t, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, batch)
        check(state.params, state.opt_state[-1].centre, t)
    assert isinstance(state.opt_state[-1], EASGDState)
    if mode == "traced":
        rows = js.comm_report(step, state, batch).select(level="emitted")
        sent = [(row.kind, row.collective, row.count, row.bytes) for row in rows if row.count]
        assert sent == [("elastic", "all-reduce", 1, 16)]


def test_an_idle_replica_is_drawn_and_does_not_draw(mesh_of):
    step = step_of(mesh_of({"replica": REPLICAS}), "traced")
    state = step.init(START)
    for batch in BATCHES:
        state, _ = step(state, batch, weight=WEIGHTS)
    check(state.params, state.opt_state[-1].centre, STEPS, moving=WEIGHTS > 0)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_loop_of_ones_own_under_shard_map(scheduled, mesh_of):
    """With the default check of what varies; the counter decides, or a phase from the host."""
    mesh = mesh_of({"replica": REPLICAS})
    tx, elastic = optax.chain(optax.sgd(RATE), sync()), sync()

    def train(params, batches):
        params = jax.tree.map(lambda x: x[0], params)
        state = tx.init(params)
        for t in range(1, STEPS + 1):
            grads = jax.grad(loss)(params, batches[t - 1, 0])
            now = {"phase": elastic.phase(t)} if scheduled else {}
            updates, state = tx.update(grads, state, params, **now)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], (params, state[-1].centre))

    spread = jax.shard_map(
        train, mesh=mesh, in_specs=(P("replica"), P(None, "replica")), out_specs=P("replica")
    )
    params = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), START)
    check(*jax.jit(spread)(params, BATCHES), STEPS)


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_run_goes_on_from_disk(mode, tmp_path):
    """On as many replicas to the bit; on others from the consensus, with the centre as it was."""
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = step_of(mesh, mode)
    state = step.init(START)
    with Checkpoints(tmp_path) as checkpoints:
        for batch in BATCHES[:4]:
            state, _ = step(state, batch)
        checkpoints.save(4, state, wait=True)
        again = checkpoints.restore(step_of(mesh, mode), START)
        fewer = checkpoints.restore(step_of(js.virtual_mesh({"replica": 2}), mode), START)
    assert again.is_exact
    found = again.state
    for t, batch in enumerate(BATCHES[4:], start=5):
        found, _ = step(found, batch)
        check(found.params, found.opt_state[-1].centre, t)
    centre = fewer.state.opt_state[-1].centre
    assert np.array_equal(centre["w"], np.asarray(state.opt_state[-1].centre["w"])[:2])
    assert fewer.state.opt_state[-1].count.tolist() == [4, 4]


def test_a_base_and_what_is_around_it():
    """What it says of itself is enough for the transforms that hold others."""
    slow = js.slowmo("replica", base=js.only_finite(sync()), sync_every=2 * PERIOD)
    assert slow.phases() == [(), ("elastic",), ("slow",)]
    assert slow.axes == ("replica",)
    with pytest.raises(ValueError, match=r"easgd: `phase` must come from .*\['elastic'\]"):
        sync().update(START, sync().init(START), START, phase=("average",))
