"""Tables of all kinds, and the program of one update, of which tests read what it sends."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js


def embeddings_of_all_kinds() -> js.embedding.Embeddings:
    """Return embeddings with tables of every way to shard and to pool."""
    kinds = [("row", "sum"), ("column", "mean"), ("table", "sum"), ("table", None)]
    tables = {
        f"t{i}": js.Table(40 + 30 * i, 8, shard=shard, pooling=pooling)
        for i, (shard, pooling) in enumerate(kinds)
    }
    return js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_adagrad(0.1))


def update_of(emb: js.embedding.Embeddings, mesh: Any) -> Any:
    """Return `update(tables, state, bags)` on a mesh or on a number of devices.

    It returns what was embedded, the tables, the state, and metrics.
    """

    def run(tables: Any, state: Any, bags: Any) -> Any:
        requests = emb.exchange_ids(bags)

        def loss(vectors: Any) -> Any:
            """A sum over the batch, so that its gradients are those of one device."""
            embedded = emb.pooled(vectors, requests)
            return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in embedded.values()), embedded

        grads, embedded = jax.grad(loss, has_aux=True)(emb.lookup(tables, requests))
        tables, state = emb.apply(tables, state, emb.send_back(grads, requests))
        return embedded, tables, state, jax.tree.map(lambda x: x[None], emb.metrics(requests))

    if isinstance(mesh, int):
        mesh = js.make_mesh({emb.axis_name: mesh}, devices=jax.devices()[:mesh])
    specs, split = (emb.specs, emb.optimizer_specs), P(emb.axis_name)
    out = split, *specs, split
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(*specs, split), out_specs=out))
