"""Replicas with different amounts of data: weights in the step, and the loop that gives them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.pairs import two_processes

REPLICAS = 4
SHAPE = (2, 3)  # a local batch
COUNTS = (3, 1, 2, 3)
RNG = np.random.default_rng(0)
DATA = [RNG.normal(size=(n, *SHAPE)).astype(np.float32) for n in COUNTS]
START = {"w": np.ones(3, np.float32), "b": np.zeros((), np.float32)}


def loss_fn(params, batch):
    loss = jnp.mean((batch @ params["w"] + params["b"] - 1) ** 2)
    return loss, {"twice": 2 * loss}


def gradient(params, batch):
    return jax.grad(lambda p: loss_fn(p, batch)[0])(params)


@pytest.mark.parametrize(
    ("mesh", "divide_by"), [(js.make_mesh, "active"), (js.virtual_mesh, "initial")]
)
def test_gradients_of_replicas_that_have_data(mesh, divide_by):
    mesh = mesh({"replica": REPLICAS})
    gradients = js.all_reduce_gradients("replica", divide_by=divide_by)
    step = js.make_train_step(loss_fn, optax.sgd(0.1), gradients=gradients, mesh=mesh)
    results = list(js.train_loop(step, step.init(START), js.uneven_batches(DATA, mesh=mesh)))
    params = START
    for t in range(max(COUNTS)):
        grads = [gradient(params, shard[t]) for shard in DATA if t < len(shard)]
        count = len(grads) if divide_by == "active" else REPLICAS
        params = jax.tree.map(lambda p, *g, n=count: p - 0.1 * sum(g) / n, params, *grads)
    for name, value in params.items():
        np.testing.assert_allclose(results[-1].state.params[name], [value] * REPLICAS, rtol=1e-5)
    weights = [np.asarray(r.metrics["weight"]).tolist() for r in results]
    assert weights == [[2, 2, 2, 2], [2, 0, 2, 2], [2, 0, 0, 2]]
    assert results[1].metrics["loss"][1] == 0
    means = js.host_mean(results[1].metrics)
    alive = np.asarray(results[1].metrics["loss"])[[0, 2, 3]]
    assert means["loss"] == pytest.approx(alive.mean())
    assert means["twice"] == pytest.approx(2 * alive.mean())


def test_equal_weights_are_none_and_a_replica_may_have_no_batch():
    mesh = js.virtual_mesh({"replica": 2})
    ((batch, weight),) = js.uneven_batches([[], [np.ones((2, 3))]], mesh=mesh)
    assert batch.shape == (4, 3)
    assert weight.tolist() == [0, 2]
    mean = js.all_reduce_gradients("replica")
    step = js.make_train_step(loss_fn, optax.sgd(0.1), gradients=mean, mesh=mesh)
    batch = np.concatenate(DATA[0][:2])
    ends = [step(step.init(START), batch, weight)[0] for weight in (None, [7, 7])]
    np.testing.assert_allclose(ends[0].params["w"], ends[1].params["w"], rtol=1e-6)


# Two processes with two devices each, on each of which lies a part of both replicas.
PROGRAM = """
import json
import threading
import numpy as np
import optax
import jaxslowmo as js

devices = sorted(jax.devices(), key=lambda d: d.id)
spans = jax.sharding.Mesh(np.array([[devices[i] for i in row] for row in ((0, 2), (1, 3))]),
    ("replica", "device"))
apart = jax.sharding.Mesh(np.array([devices[i] for i in (0, 2, 1, 3)]), ("replica",))
rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)
said = {}

def train(mesh, shares, **options):
    step = js.make_train_step(
        lambda p, b: ((b @ p["w"]) ** 2).mean(), optax.sgd(0.1),
        gradients=js.all_reduce_gradients(("replica", *mesh.axis_names[1:]), divide_by="active"),
        mesh=mesh, **options,
    )
    state, weights = step.init({"w": np.ones(3, np.float32)}), []
    for batch, weight in js.uneven_batches(shares, mesh=mesh):
        state, metrics = step(state, batch, weight)
        weights.append(metrics["weight"].addressable_data(0).tolist())
    return state.params["w"].addressable_data(0)[0].tolist(), weights

for host_batch in ("local", "global"):
    said[host_batch] = train(spans, [list(rows[0][:3]), list(rows[1][:1])], host_batch=host_batch)
# Replicas 0 and 2 are the first process', 1 and 3 the second's; each has one batch of its own.
said["apart"] = train(apart, [[rows[0][i][:2]] for i in [[0, 1], [1, 2]][rank]])
for name, shares in {
    "rows": [list(rows[0][: 2 + rank]), list(rows[1])],
    "shapes": [[np.ones((2, 3 + rank))], []],
}.items():
    try:
        train(spans, shares)
    except ValueError as error:
        said[name] = str(error)

# The first process is in a step when it asks for the next batch; the second is yet to start it.
mesh = jax.sharding.Mesh(np.array([devices[0], devices[2]]), ("replica",))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh,
    in_specs=jax.P("replica"), out_specs=jax.P()))
sums = said["sums"] = []

def add(weight):
    sums.append(float(total(weight).addressable_data(0)[0]))

def loader():
    yield np.ones((1, 2), np.float32)
    yield np.ones((1, 2), np.float32)
    if rank:
        raise OSError(28, "No space left")
    yield np.ones((1, 2), np.float32)

batches = js.uneven_batches([loader()], mesh=mesh)
_, first = next(batches)
add(first)
running = threading.Thread(target=add, args=(first,))
if rank == 0:
    running.start()
    running.join(0.3)
    assert running.is_alive()
_, second = next(batches)
if rank == 1:
    running.start()
running.join()
add(second)
try:
    next(batches)
except (OSError, RuntimeError) as error:
    said["loader"] = f"{type(error).__name__} {error}"
print(json.dumps(said))
"""


def test_several_processes(tmp_path):
    """Replicas that two processes share count once; those of one process need not be neighbours.

    Processes ask each other past their devices: an exchange between these would stand behind the
    step, which waits for the other process. A loader that fails on one ends the loops of all.
    """
    printed = two_processes(PROGRAM, tmp_path, devices=2)
    rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)

    def trained(*batches):
        w = np.ones(3)
        for replicas in batches:
            w = w - 0.1 * np.mean([2 * x.T @ (x @ w) / len(x) for x in replicas], axis=0)
        return w

    wanted = trained([rows[0][0], rows[1][0]], [rows[0][1]], [rows[0][2]])
    apart = trained([rows[0][i][:2] for i in (0, 1, 1, 2)])
    both = [json.loads(text.splitlines()[-1]) for text in printed]
    for said in both:
        for host_batch in ("local", "global"):
            np.testing.assert_allclose(said[host_batch][0], wanted, rtol=1e-5)
            assert said[host_batch][1] == [[4], [4], [4]]
        np.testing.assert_allclose(said["apart"][0], apart, rtol=1e-5)
        assert "share replicas [0]" in said["rows"]
        assert "other shapes on another process" in said["shapes"]
        assert said["sums"] == [2, 2, 2]
    assert both[1]["loader"] == "OSError [Errno 28] No space left"
    assert both[0]["loader"].startswith("RuntimeError")
    assert "process 1 ended in an error: OSError: [Errno 28] No space left" in both[0]["loader"]
