"""Embedding tables of a step: where they lie, and how they begin."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
from ...embedding import Embeddings, WithTables
from ...mesh import (
    AnyMesh,
    VirtualMesh,
    axis_names,
    map_replicas,
    replica_count,
    replicate,
    vary_over,
)
from ...transform import ParameterTransform
from .._state import TrainState
from .update import Tables, WithVectors, on_shards


def tables_of(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Tables:
    """The tables of a step.

    Raises:
      ValueError: what is no `Embeddings`; an axis that the mesh lacks, or one of the replicas';
        several shards on a `VirtualMesh`.
    """
    if not isinstance(embeddings, Embeddings):
        raise ValueError(
            f"`embeddings` must be made by js.embeddings, got {type(embeddings).__name__}."
        )
    axis = embeddings.axis_name
    if axis is None:
        return Tables(embeddings, None, None)
    if axis not in mesh.shape:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, and `mesh` has the axes "
            f"{list(mesh.axis_names)}: name one of these as `axis_name` of js.embeddings, or None "
            "for tables that each device holds whole."
        )
    embeddings = embeddings.over(mesh)
    if axis in axis_names(axis_name):
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, along which the replicas of this step lie: "
            "every replica has tables of its own, sharded over an axis inside of it."
        )
    if isinstance(mesh, VirtualMesh) and mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
            "replicas have no devices inside: use js.make_mesh, or axis_name=None."
        )
    if isinstance(mesh, VirtualMesh):
        return Tables(dataclasses.replace(embeddings, axis_name=None), axis, None)
    return Tables(embeddings, axis, axis)


def sync_of_tables(sync: ParameterTransform | None, tables: Tables) -> ParameterTransform | None:
    """A parameter transform that knows how tables lie inside a replica, for its state too."""
    if sync is None or tables.nested is None:
        return sync
    specs = WithTables(P(), tables.embeddings.specs)
    return sync.with_specs(specs, of_state=True) if sync.shards_whole_leaves else sync


def seen_by_loss(
    tables: Tables | None, state: TrainState, share: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Types of the parameters, the batch and the model state that a loss function is given.

    Args:
      tables: of the step; None without.
      state: of it.
      share: types of what one device has of a batch.

    Communication: none.
    """

    def own(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    params, model_state = jax.tree.map(own, (state.params, state.model_state))
    if tables is None:
        return params, share, model_state

    def look_up(params: WithTables, batch: PyTree) -> PyTree:
        embeddings = tables.embeddings
        return embeddings.reference(params.tables, embeddings.bags_of(batch), params.dense)

    embedded = jax.eval_shape(look_up, params, share)
    return params.dense, WithVectors(share, embedded), model_state


def new_tables(tables: Tables, key: jax.Array, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Tables of all replicas, equal on them: each device makes its own part.

    Communication: none.
    """
    return _maker(tables, mesh, axis_name)(jax.random.key_data(key))


def stacked_params(
    tables: Tables | None, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """Parameters of all replicas, equal on them.

    Args:
      tables: of the step; None without.
      params: of one; with tables the dense ones, or `WithTables(dense, stored)`.
      seed: of tables that were not given.
      mesh: of the step.
      axis_name: of its replicas.

    Raises:
      ValueError: stored tables of other names or shapes.

    Communication: none.
    """
    lies: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    if tables is None:
        return replicate(params, **lies)
    if isinstance(params, WithTables):
        given = given_tables(tables, params.tables, **lies)
        return WithTables(replicate(params.dense, **lies), given)
    made = new_tables(tables, jax.random.key(seed), **lies)
    return WithTables(replicate(params, **lies), made)


def given_tables(tables: Tables, stored: PyTree, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """The same stored tables for all replicas: each device is given its own part alone.

    Args:
      tables: of the step.
      stored: whole arrays by name, as `Embeddings.write` makes them.
      mesh: of the step.
      axis_name: of its replicas.

    Raises:
      ValueError: arrays of other names or shapes.

    Communication: none.
    """
    stores = tables.embeddings.layout().stores
    wanted = {name: (store.num_rows, store.dim) for name, store in stores.items()}
    given = {name: jnp.shape(x) for name, x in stored.items()} if isinstance(stored, dict) else {}
    if wanted != given:
        raise ValueError(
            f"`params` must hold stored tables of the shapes {wanted}, as step.embeddings.write("
            f"tables) makes them, got {given or type(stored).__name__}."
        )
    typed = {name: jnp.dtype(store.dtype) for name, store in stores.items()}
    if tables.nested is None:
        own = {name: jnp.asarray(x, typed[name]) for name, x in stored.items()}
        return replicate(own, mesh=mesh, axis_name=axis_name)
    count = replica_count("init", mesh, axis_name)
    lies = _shardings(tables.embeddings, mesh, axis_name)

    def placed(name: str, whole: np.ndarray) -> jax.Array:
        def of_device(where: Any) -> np.ndarray:
            return whole[where[1:]][None].astype(typed[name])

        return jax.make_array_from_callback((count, *whole.shape), lies[name], of_device)

    return {name: placed(name, np.asarray(x)) for name, x in stored.items()}


def _shardings(embeddings: Embeddings, mesh: Any, axis_name: AxisName) -> dict[str, NamedSharding]:
    """How the stored tables of all replicas lie."""
    first = axis_names(axis_name)
    return {n: NamedSharding(mesh, P(first, *spec)) for n, spec in embeddings.specs.items()}


@functools.lru_cache(maxsize=16)
def _maker(tables: Tables, mesh: AnyMesh, axis_name: AxisName) -> Callable[[jax.Array], PyTree]:
    embeddings, axis = tables.embeddings, tables.nested

    def per_replica(bits: jax.Array) -> PyTree:
        def made(bits: jax.Array) -> PyTree:
            return embeddings.init_local(jax.random.wrap_key_data(bits))

        local = on_shards(axis, made, bits, kinds=("whole",), out=embeddings.specs)
        return vary_over(local, axis_names(axis_name))

    mapped = map_replicas(
        per_replica,
        mesh=mesh,
        axis_name=axis_name,
        in_roles=("shared",),
        automatic=frozenset() if axis is None else frozenset({axis}),
    )
    if axis is None or isinstance(mesh, VirtualMesh):
        return jax.jit(mapped)
    return jax.jit(mapped, out_shardings=_shardings(embeddings, mesh, axis_name))
