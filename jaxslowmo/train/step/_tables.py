"""Embedding tables of a step: where they lie, and how they begin."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
from ...embedding import Embeddings, WithTables
from ...mesh import AnyMesh, VirtualMesh, axis_names, map_replicas, vary_over
from ...transform import ParameterTransform
from .._state import TrainState
from .update import Tables, WithVectors, on_shards


def tables_of(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Tables:
    """The tables of a step.

    Raises:
      ValueError: an axis that the mesh lacks, or one of the replicas'; several shards on a
        `VirtualMesh`.
    """
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
    lies = jax.tree.map(
        lambda spec: NamedSharding(mesh, P(axis_names(axis_name), *spec)), embeddings.specs
    )
    return jax.jit(mapped, out_shardings=lies)
