"""Tables, batches, and programs of one update, which the tests of this folder share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

SHARDS = ("row", "column", "table")
POOLINGS = ("sum", "mean", None)
BATCH = 16
RATE = 0.1


class Update(NamedTuple):
    """The results of one update of `update_of`."""

    embedded: dict[str, jax.Array]
    tables: dict[str, jax.Array]
    state: js.RowwiseState
    metrics: dict[str, jax.Array]


def tables_of(shard: str, pooling: str | None, dtype: Any = jnp.float32) -> dict[str, js.Table]:
    """Return three tables: one for two features, a tiny one of its width, and a wider one."""
    options: dict[str, Any] = {"shard": shard, "pooling": pooling, "dtype": dtype}
    return {
        "user": js.Table(100, 8, features=("user", "friend"), **options),
        "item": js.Table(3, 8, **options),
        "word": js.Table(300, 16, **options),
    }


def batch_of(seed: int) -> dict[str, Any]:
    """Return bags with weights, single ids, empty bags, and ids of small types, by feature."""
    random = np.random.RandomState(seed)
    item = random.randint(-1, 3, (BATCH, 4))
    item[::3] = -1
    return {
        "user": js.Bags(
            random.randint(-1, 100, (BATCH, 3)).astype(np.int32),
            random.rand(BATCH, 3).astype(np.float32),
        ),
        "friend": random.randint(0, 100, BATCH).astype(np.int8),
        "item": item.astype(np.int32),
        "word": random.randint(0, 300, (BATCH, 2)).astype(np.uint16),
    }


def embeddings_of_all_kinds(**options: Any) -> js.Embeddings:
    """Return embeddings with tables of every way to shard and to pool."""
    kinds = [("row", "sum"), ("column", "mean"), ("table", "sum"), ("table", None)]
    tables = {
        f"t{i}": js.Table(40 + 30 * i, 8, shard=shard, pooling=pooling)
        for i, (shard, pooling) in enumerate(kinds)
    }
    options = {"axis_name": "shard", "optimizer": js.rowwise_adagrad(RATE), **options}
    return js.embeddings(tables, **options)


def loss_of(embedded: dict[str, jax.Array]) -> jax.Array:
    """Return a loss that sums over the batch, so that its gradients are those of one device."""
    parts = sorted(embedded.items())
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) * (i + 1) for i, (_, x) in enumerate(parts))


def per_device(emb: js.Embeddings, tables: Any, state: Any, bags: Any) -> Update:
    """Run one update on a device, within the axis."""
    requests = emb.exchange_ids(bags)

    def loss(vectors):
        embedded = emb.pooled(vectors, requests)
        return loss_of(embedded), embedded

    grads, embedded = jax.grad(loss, has_aux=True)(emb.lookup(tables, requests))
    tables, state = emb.apply(tables, state, emb.send_back(grads, requests))
    metrics = {name: x[None] for name, x in emb.metrics(requests).items()}
    return Update(embedded, tables, state, metrics)


def update_of(emb: js.Embeddings, mesh: Any, *, check_vma: bool = True):
    """Return `update(tables, state, bags) -> Update` on a mesh or on a number of devices."""
    run = functools.partial(per_device, emb)
    if emb.axis_name is None:
        return jax.jit(run)
    if isinstance(mesh, int):
        mesh = js.make_mesh({emb.axis_name: mesh}, devices=jax.devices()[:mesh])
    specs, split = (emb.specs, emb.optimizer_specs), P(emb.axis_name)
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(*specs, split),
            out_specs=Update(split, *specs, split),
            check_vma=check_vma,
        )
    )
