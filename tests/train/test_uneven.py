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


def mesh_of(kind):
    return {"devices": js.make_mesh, "virtual": js.virtual_mesh}[kind]({"replica": REPLICAS})


def gradient(params, batch):
    return jax.grad(lambda p: loss_fn(p, batch)[0])(params)


def mean_step(params, step, divide_by="active"):
    """One update of plain SGD with the mean gradient of those that have data."""
    grads = [gradient(params, shard[step]) for shard in DATA if step < len(shard)]
    count = len(grads) if divide_by == "active" else REPLICAS
    return jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / count, params, *grads)


@pytest.mark.parametrize("kind", ["devices", "virtual"])
@pytest.mark.parametrize("divide_by", ["initial", "active"])
def test_gradients_of_replicas_that_have_data(kind, divide_by):
    mesh = mesh_of(kind)
    step = js.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        gradients=js.all_reduce_gradients("replica", divide_by=divide_by),
        mesh=mesh,
    )
    results = list(js.train_loop(step, step.init(START), js.uneven_batches(DATA, mesh=mesh)))
    assert len(results) == max(COUNTS)
    params = START
    for t in range(max(COUNTS)):
        params = mean_step(params, t, divide_by)
    final = results[-1].state.params
    for name, value in params.items():
        for replica in range(REPLICAS):
            np.testing.assert_allclose(final[name][replica], value, rtol=1e-5)
    weights = [np.asarray(r.metrics["weight"]).tolist() for r in results]
    assert weights == [[2, 2, 2, 2], [2, 0, 2, 2], [2, 0, 0, 2]]
    assert results[1].metrics["loss"][1] == 0
    means = js.host_mean(results[1].metrics)
    alive = np.asarray(results[1].metrics["loss"])[[0, 2, 3]]
    assert means["loss"] == pytest.approx(alive.mean())
    assert means["twice"] == pytest.approx(2 * alive.mean())


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_local_training_follows_the_others(mode):
    """One that has run out keeps its optimizer state, and takes the mean of the others."""
    mesh = mesh_of("devices")
    step = js.make_train_step(
        loss_fn,
        optax.sgd(0.1, momentum=0.9),
        sync=js.local_sgd("replica", sync_every=3),
        mesh=mesh,
        mode=mode,
    )
    params = [START] * REPLICAS
    trace = [jax.tree.map(np.zeros_like, START)] * REPLICAS
    state = step.init(START)
    for t, (batch, weight) in enumerate(js.uneven_batches(DATA, mesh=mesh)):
        state, _ = step(state, batch, weight)
        for r in range(REPLICAS):
            if t < COUNTS[r]:
                g = gradient(params[r], DATA[r][t])
                trace[r] = jax.tree.map(lambda m, x: 0.9 * m + x, trace[r], g)
                params[r] = jax.tree.map(lambda p, m: p - 0.1 * m, params[r], trace[r])
    # After three updates replicas 0 and 3 are left.
    mean = jax.tree.map(lambda a, b: (a + b) / 2, params[0], params[3])
    kept = state.opt_state[1][0].trace
    for name in START:
        for r in range(REPLICAS):
            np.testing.assert_allclose(state.params[name][r], mean[name], rtol=1e-5)
            np.testing.assert_allclose(kept[name][r], trace[r][name], rtol=1e-5, atol=1e-7)


def test_no_weight_is_weight_one():
    mesh = mesh_of("virtual")
    step = js.make_train_step(
        loss_fn, optax.sgd(0.1), gradients=js.all_reduce_gradients("replica"), mesh=mesh
    )
    batch = np.concatenate([shard[0] for shard in DATA])
    plain, _ = step(step.init(START), batch)
    alike, _ = step(step.init(START), batch, np.full(REPLICAS, 7.0))
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(alike.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def batches(*shapes):
    return [[np.zeros(shape, np.float32)] for shape in shapes]


def test_a_replica_without_any_batch():
    mesh = js.virtual_mesh({"replica": 2})
    ((batch, weight),) = js.uneven_batches([[], [np.ones((2, 3))]], mesh=mesh)
    assert batch.shape == (4, 3)
    assert weight.tolist() == [0, 2]


def test_the_end_may_be_an_error():
    found = js.uneven_batches(DATA, mesh=mesh_of("virtual"), on_exhausted="raise")
    next(found)
    with pytest.raises(RuntimeError, match=r"replicas \[1\] have run out"):
        next(found)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (batches((2, 3)), r"has 2 of 2, got 1 shares"),
        (batches((2, 3), (1, 3)), r"first and .*\(1, 3\) float32'\] on replica 1; pad a smaller"),
        ([[np.zeros((2, 3)), np.zeros((1, 3))], []], r"\(1, 3\) float64'\] on replica 0"),
        ([[], []], r"replicas \[0, 1\] of this process have no batch at all"),
        ([[{}], [{}]], "one without arrays"),
    ],
)
def test_shares_that_do_not_fit(shares, said):
    with pytest.raises(ValueError, match=said):
        list(js.uneven_batches(shares, mesh=js.virtual_mesh({"replica": 2})))


# Two processes with two devices each, on each of which lies a part of both replicas.
PROGRAM = """
import json
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
try:
    train(spans, [list(rows[0][: 2 + rank]), list(rows[1])])
except ValueError as error:
    said["error"] = str(error)
print(json.dumps(said))
"""


def test_several_processes(tmp_path):
    """Replicas that two processes share count once; those of one process need not be neighbours."""
    printed = two_processes(PROGRAM, tmp_path, devices=2)
    rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)

    def trained(*batches):
        w = np.ones(3)
        for replicas in batches:
            w = w - 0.1 * np.mean([2 * x.T @ (x @ w) / len(x) for x in replicas], axis=0)
        return w

    wanted = trained([rows[0][0], rows[1][0]], [rows[0][1]], [rows[0][2]])
    for text in printed:
        said = json.loads(text.splitlines()[-1])
        for host_batch in ("local", "global"):
            np.testing.assert_allclose(said[host_batch][0], wanted, rtol=1e-5)
            assert said[host_batch][1] == [[4], [4], [4]]
        np.testing.assert_allclose(
            said["apart"][0], trained([rows[0][i][:2] for i in (0, 1, 1, 2)]), rtol=1e-5
        )
        assert "processes that share replicas [0] must give the same batches" in said["error"]


# The first process is in a step when it asks for the next batch; the second is yet to start it.
APART = """
import threading
import numpy as np
import jaxslowmo as js

mesh = js.make_mesh({"replica": 2})
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh,
    in_specs=jax.P("replica"), out_specs=jax.P()))
sums = []

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
print(sums)
try:
    next(batches)
except (OSError, RuntimeError) as error:
    print(type(error).__name__, error)
"""


def test_processes_ask_each_other_past_their_devices(tmp_path):
    """An exchange between devices would stand behind the step, which waits for the other process.

    And a loader that fails on one process ends the loops of all.
    """
    first, second = (x.splitlines()[-2:] for x in two_processes(APART, tmp_path, seconds=60))
    assert first[0] == second[0] == "[2.0, 2.0, 2.0]"
    assert second[1] == "OSError [Errno 28] No space left"
    assert first[1] == (
        "RuntimeError uneven_batches: `shares` of process 1 ended in an error: OSError: [Errno 28] "
        "No space left"
    )


def test_another_way_to_end():
    with pytest.raises(ValueError, match='`on_exhausted` must be "follow" or "raise", got \'x\''):
        js.uneven_batches(DATA, mesh=mesh_of("virtual"), on_exhausted="x")
