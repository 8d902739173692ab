"""A small model with tables, and the same one whose tables are ordinary parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

REPLICAS, ROWS = 2, 8
SIZES = {"item": (40, 4), "user": (24, 4)}
DENSE = {"w": np.linspace(-1.0, 1.0, 8, dtype=np.float32), "b": np.float32(0.1)}
RATE, EPS = 0.5, 1e-8


def batches(count, seed=0, rows=REPLICAS * ROWS):
    """Bags of items, some empty, and a user each; frequent ids are frequent."""
    rng = np.random.default_rng(seed)
    return [
        {
            "item": np.where(
                rng.random((rows, 3)) < 0.3, -1, rng.integers(0, 40, (rows, 3)) ** 2 // 40
            ).astype(np.int32),
            "user": rng.integers(0, 24, rows).astype(np.int32),
            "y": rng.normal(size=rows).astype(np.float32),
        }
        for _ in range(count)
    ]


OWN = {
    "item": js.rowwise_sgd(RATE, momentum=0.5, nesterov=True),
    "user": js.rowwise_adam(0.1, b2=0.9, eps=1e-3, weight_decay=0.1),
}


def embeddings(shard="row", axis="shard", own=None, **options):
    """Two tables of one width, those in `own` with optimizers of their own."""
    own = own or {}
    tables = {
        "item": js.Table(*SIZES["item"], shard=shard, pooling="mean", optimizer=own.get("item")),
        "user": js.Table(*SIZES["user"], shard=shard, optimizer=own.get("user")),
    }
    options.setdefault("optimizer", js.rowwise_adagrad(RATE, eps=EPS))
    return js.embeddings(tables, axis_name=axis, **options)


def loss(params, batch, *, embedded):
    """Least squares of what was looked up."""
    found = jnp.concatenate([embedded["item"], embedded["user"]], axis=1)
    return jnp.mean((jnp.tanh(found @ params["w"] + params["b"][None]) - batch["y"]) ** 2)


def step_of(shards, *, shard="row", kinds=jax.sharding.AxisType.Auto, mesh=None, **options):
    """A step on so many devices per replica."""
    if mesh is None:
        devices = np.array(jax.devices()[: REPLICAS * shards]).reshape(REPLICAS, shards)
        mesh = jax.sharding.Mesh(devices, ("replica", "shard"), axis_types=(kinds,) * 2)
    made = options.pop("embeddings", None) or embeddings(shard)
    optimizer = options.pop("optimizer", None) or optax.sgd(0.3)
    loss_fn = options.pop("loss_fn", loss)
    return js.make_train_step(loss_fn, optimizer, mesh=mesh, embeddings=made, **options)


def whole(step, state):
    """The tables of all replicas by name, (replicas, rows, dim), on the host."""
    stored = jax.tree.map(np.asarray, state.params.tables)
    return jax.tree.map(np.asarray, _reader(step)(stored))


@functools.lru_cache(maxsize=2)
def _reader(step):
    return jax.jit(jax.vmap(step.embeddings.over(step.mesh).read))


def rowwise():
    """Row-wise Adagrad of a dense gradient."""

    def init(params):
        return jax.tree.map(lambda x: jnp.zeros(x.shape[0]), params)

    def update(grads, state, params=None):
        del params
        sums = jax.tree.map(lambda s, g: s + jnp.mean(g * g, axis=1), state, grads)
        moved = jax.tree.map(lambda g, s: -RATE * g / (jnp.sqrt(s) + EPS)[:, None], grads, sums)
        return moved, sums

    return optax.GradientTransformation(init, update)
