"""A training step with sharded tables, to be compiled for described devices.

The step is made of `js.embeddings`' own functions, as `js.make_train_step` makes it of them.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

S = "shard"


@dataclass(frozen=True)
class Workload:
    """The sizes of a model with tables.

    Attributes:
      tables, rows, dim: number of tables, and their shape.
      batch: examples of a device, with one id per table.
      widths: widths of the MLP on top of all vectors.
    """

    tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    batch: int = 1024
    widths: tuple[int, ...] = (2048, 2048, 2048)

    @property
    def num_products(self) -> int:
        """The number of matrix products, forward and backward to weights and inputs."""
        return 3 * len(self.widths)


Ahead = Literal["ids", "vectors"]


def lowered_with_tables(mesh: Mesh, workload: Workload, ahead: Ahead) -> jax.stages.Lowered:
    """Return the program of a step.

    Args:
      mesh: mesh of described devices, with the one axis "shard".
      workload: sizes.
      ahead: what the step exchanges for the next batch: only its ids, or its vectors too.
    """
    names = [f"t{i}" for i in range(workload.tables)]
    embeddings = js.embeddings(
        {name: js.Table(workload.rows, workload.dim) for name in names},
        axis_name=S,
        capacity=2 * workload.batch // mesh.size,
        optimizer=js.rowwise_adagrad(0.01),
    ).over(mesh)

    def exchanged(tables: Any, ids: Any) -> tuple[Any, Any]:
        requests = embeddings.exchange_ids(ids)
        return requests, embeddings.lookup(tables, requests) if ahead == "vectors" else None

    def step(tables: Any, state: Any, params: Any, carry: Any, upcoming: Any) -> Any:
        requests, vectors = carry
        following = exchanged(tables, upcoming)
        if vectors is None:
            vectors = embeddings.lookup(tables, requests)

        def loss(params: Any, vectors: Any) -> jax.Array:
            pooled = embeddings.pooled(vectors, requests)
            x = jnp.concatenate([pooled[name] for name in names], axis=1)
            for matrix in params:
                x = jnp.tanh(x @ matrix)
            return jnp.mean(x**2)

        of_params, of_vectors = jax.grad(loss, (0, 1))(params, vectors)
        rows = embeddings.send_back(of_vectors, requests)
        tables, state = embeddings.apply(tables, state, rows)
        params = [p - 0.1 * lax.pmean(g, S) for p, g in zip(params, of_params, strict=True)]
        return tables, state, params, following

    specs, state_specs = embeddings.specs, embeddings.optimizer_specs
    tables = jax.eval_shape(embeddings.init, jax.random.key(0))
    state = jax.eval_shape(embeddings.init_optimizer, tables)
    ids = dict.fromkeys(names, jax.ShapeDtypeStruct((workload.batch * mesh.size,), jnp.int32))
    sizes = (workload.tables * workload.dim, *workload.widths)
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in itertools.pairwise(sizes)]

    def on_mesh(fn: Any, in_specs: Any, out_specs: Any) -> Any:
        # Rows of tables by column are equal everywhere; nothing here is by column.
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    carry = jax.eval_shape(on_mesh(exchanged, (specs, P(S)), P(S)), tables, ids)
    arguments = (
        _placed(tables, specs, mesh),
        _placed(state, state_specs, mesh),
        _placed(params, P(), mesh),
        _placed(carry, P(S), mesh),
        _placed(ids, P(S), mesh),
    )
    in_specs = (specs, state_specs, P(), P(S), P(S))
    fn = on_mesh(step, in_specs, (specs, state_specs, P(), P(S)))
    return jax.jit(fn, donate_argnums=(0, 1, 2, 3)).lower(*arguments)


def _placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Return the shapes of `tree` with the shardings of `specs`, a prefix of the tree."""

    def one(spec: P, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, P))
