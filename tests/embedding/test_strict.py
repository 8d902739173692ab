"""Tables under jax's debugging settings, and inside of `jax.set_mesh`."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.strict import SETTINGS, assert_equal_bits

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "user": js.embedding.bags([[1, 5], [], [7], [2, 2]] * 2, max_length=2),
        "item": RNG.integers(0, 9, 8).astype(np.int32),
        "y": RNG.normal(size=8).astype(np.float32),
    }
    for _ in range(4)
]


def loss_fn(params, batch, *, embedded):
    x = embedded["user"] + embedded["item"]
    return jnp.mean((x @ params["w"] - batch["y"]) ** 2)


def program(mesh):
    """Train tables that devices share, one step ahead and by hand; return what came of it."""
    user = js.Table(10, 3, optimizer=js.rowwise_adagrad(0.1))
    item = js.Table(9, 3, shard="table", pooling=None)
    embeddings = js.embeddings(
        {"user": user, "item": item},
        axis_name="shard",
        inputs=lambda batch: {"user": batch["user"], "item": batch["item"]},
        optimizer=js.rowwise_sgd(0.1, momentum=0.5),
    )
    gradients = js.all_reduce_gradients("replica")
    options = {"gradients": gradients, "embeddings": embeddings, "mesh": mesh}
    step = js.make_train_step(loss_fn, optax.sgd(0.1), **options)
    params = {"w": np.ones(3, np.float32)}
    drawn = step.embeddings.read(step.consensus(step.init(params)).tables)
    state = step.init(js.embedding.WithTables(params, step.embeddings.write(drawn)))
    for result in js.TrainPipeline(step, state, iter(BATCHES[:3])):
        state = result.state
    state, metrics = step(state, BATCHES[3])
    step.refuse_ids()
    consensus = step.consensus(state)
    return metrics, step.embeddings.read(consensus.tables), consensus.dense


def test_tables_train_alike():
    mesh = js.make_mesh({"replica": 2, "shard": 2})
    expected = program(mesh)
    with SETTINGS["set_mesh"](mesh), SETTINGS["checks"](mesh):
        assert_equal_bits(program(mesh), expected)
