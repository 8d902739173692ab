"""Tables of all kinds, and the program of one update, of which tests read what it sends."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

RATE = 0.1


class Update(NamedTuple):
    """The results of one update of `update_of`."""

    embedded: dict[str, jax.Array]
    tables: dict[str, jax.Array]
    state: js.embedding.RowwiseState
    metrics: dict[str, jax.Array]


def embeddings_of_all_kinds(**options: Any) -> js.embedding.Embeddings:
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


def per_device(emb: js.embedding.Embeddings, tables: Any, state: Any, bags: Any) -> Update:
    """Run one update on a device, within the axis."""
    requests = emb.exchange_ids(bags)

    def loss(vectors):
        embedded = emb.pooled(vectors, requests)
        return loss_of(embedded), embedded

    grads, embedded = jax.grad(loss, has_aux=True)(emb.lookup(tables, requests))
    tables, state = emb.apply(tables, state, emb.send_back(grads, requests))
    metrics = {name: x[None] for name, x in emb.metrics(requests).items()}
    return Update(embedded, tables, state, metrics)


def update_of(emb: js.embedding.Embeddings, mesh: Any, *, check_vma: bool = True):
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
