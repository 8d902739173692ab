"""What a training step knows of tables: its lookups ahead, their arrays, rows of several batches.

Parameters of a step with tables are `WithTables(dense, tables)`: dense ones, which its optimizer
updates, and stored tables, whose rows are requested by a batch and updated on the devices that hold
them. The states of the two optimizers are `WithTables`, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..gradients.sparse import RowGradient, Rows, coalesce, no_rows
from ..mesh import (
    AnyMesh,
    array_from_host,
    axis_names,
    has_device_per_position,
    key_bits,
    map_replicas,
    placement,
    put_on_all_devices,
    replica_count,
    replicate,
)
from ..tree import WeightedSum, at_least_float32
from ._embeddings import Embeddings
from ._exchange import Requests
from ._stores import check_shapes


class PrefetchOptions(NamedTuple):
    """The table exchanges of the next batch that run during a step; static.

    Attributes:
      vectors: whether rows are looked up and sent, not only row numbers.
      patches: whether rows that the step changes are sent again.
      room: fraction of the slots between two devices that can be sent again, 0 to 1.
    """

    vectors: bool = False
    patches: bool = False
    room: float = 0.25


class PrefetchedRows(NamedTuple):
    """The request for the rows of a batch that an earlier step made; leaves (devices, ...).

    Attributes:
      requests: the rows that each device uses, and those that others request from it.
      vectors: the requested rows as they were then; None if the batch's own step looks them up.
    """

    requests: Requests
    vectors: PyTree


class BatchWithVectors(NamedTuple):
    """A batch with the vectors that were looked up for it, as the loss function receives it.

    Attributes:
      batch: the batch as the step received it.
      embedded: rows or pooled rows by feature, of shape (examples, ...).
    """

    batch: PyTree
    embedded: Any


def tables_for_mesh(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Embeddings:
    """Return the tables of a training step, for its argument `embeddings` and its mesh.

    Raises:
      ValueError: an argument that is not `Embeddings`; an axis that the mesh lacks, or that is a
        replica axis; several shards on a `VirtualMesh`.
    """
    if not isinstance(embeddings, Embeddings):
        kind = type(embeddings).__name__
        raise ValueError(f"`embeddings` must be made by js.embeddings, got {kind}.")
    axis = embeddings.axis_name
    if axis is None:
        return embeddings
    embeddings = embeddings.over(mesh)
    if axis in axis_names(axis_name):
        raise ValueError(
            f"`embeddings` must be sharded over an axis inside a replica, got {axis!r}, a replica "
            "axis of this step."
        )
    if has_device_per_position(mesh):
        return embeddings
    if mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` over {axis!r} of size {mesh.shape[axis]} need devices inside a replica, "
            "got a virtual mesh: use js.make_mesh, or axis_name=None."
        )
    return replace(embeddings, axis_name=None)


def replicate_tables(
    embeddings: Embeddings, tables: Any, seed: int, *, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """Return the stored tables of all replicas, equal on them.

    Args:
      embeddings: the tables.
      tables: stored tables of one replica, with the names and shapes of these; None: new ones.
      seed: seed of new ones.
      mesh: mesh of the step.
      axis_name: name of the replica axis or axes.

    Raises:
      ValueError: stored tables of other names or shapes.

    Communication: none.
    """
    if tables is None:
        bits = put_on_all_devices(key_bits(seed), mesh)
        return _init_tables_fn(embeddings, mesh, axis_name)(bits)
    stores = embeddings.layout().stores
    shapes = {name: (store.num_rows, store.dim) for name, store in stores.items()}
    check_shapes("`params` must hold what step.embeddings.write returns:", shapes, tables)
    if embeddings.axis_name is None:
        arrays = {name: jnp.asarray(x, stores[name].dtype) for name, x in tables.items()}
        return replicate(arrays, mesh=mesh, axis_name=axis_name)
    first, count = axis_names(axis_name), replica_count("init", mesh, axis_name)

    def shard_table(name: str, whole: np.ndarray) -> jax.Array:
        def device_slice(index: Any) -> np.ndarray:  # each device receives only its part
            return whole[index[1:]][None].astype(stores[name].dtype)

        where = placement(mesh, P(first, *embeddings.specs[name]))
        return array_from_host((count, *whole.shape), where, device_slice)

    return {name: shard_table(name, np.asarray(x)) for name, x in tables.items()}


@lru_cache(maxsize=16)
def _init_tables_fn(
    embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName
) -> Callable[[jax.Array], PyTree]:
    """Return a function from key data to new tables of all replicas, equal on them.

    Each device makes only its own part.

    Communication: none.
    """

    def make(bits: jax.Array) -> PyTree:
        return embeddings.init_local(jax.random.wrap_key_data(bits))

    where: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    return jax.jit(map_replicas(make, in_roles=("shared",), out_roles=embeddings.specs, **where))


def init_table_state(
    embeddings: Embeddings, tables: PyTree, *, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """Return the first state of the tables' optimizers, for the tables of all replicas.

    Communication: none.
    """
    init, roles = embeddings.init_optimizer, (embeddings.specs, embeddings.optimizer_specs)
    where: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    return jax.jit(map_replicas(init, in_roles=roles[:1], out_roles=roles[1], **where))(tables)


def empty_rows(like: Rows, num_batches: int) -> Rows:
    """Return empty gradients with room for the rows of several batches, in at least float32.

    Args:
      like: row gradients of one batch; only shapes and dtypes are used.
      num_batches: number of batches, 0 or more.
    """
    return {
        name: no_rows(g, num_batches * g.rows.shape[0], at_least_float32(g.dtype))
        for name, g in like.items()
    }


def accumulate_rows(
    before: Rows, rows: Rows, weight: jax.Array | None, place: jax.Array | None
) -> Rows:
    """Return the row gradients `before` with those of another batch added.

    Args:
      before: row gradients of the batches so far.
      rows: row gradients of the other batch. They are multiplied by its weight in at least
        float32; with weight 0 they become padding, with zeros.
      weight: () weight of the other batch; None: 1.
      place: () int32, index of the room in `before` (see `empty_rows`) that they fill; None
        appends them.
    """

    def weight_rows(g: RowGradient) -> RowGradient:
        values = WeightedSum.from_value(g.values, weight).sum
        if weight is None:
            return replace(g, values=values)
        numbers = jnp.where(weight > 0, g.rows, jnp.full_like(g.rows, g.num_rows))
        return replace(g, rows=numbers, values=values)

    def add_batch(room: RowGradient, gradient: RowGradient) -> RowGradient:
        if place is None:
            return room + gradient
        start = place * gradient.rows.shape[0]
        return jax.tree.map(
            lambda x, more: lax.dynamic_update_slice_in_dim(x, more, start, 0), room, gradient
        )

    return {name: add_batch(before[name], weight_rows(gradient)) for name, gradient in rows.items()}


def row_means(rows: Rows, weight: jax.Array) -> Rows:
    """Return each row once, with the mean of its values; `weight` is the sum of their weights.

    Communication: none.
    """

    def one(gradient: RowGradient) -> RowGradient:
        once = coalesce(gradient).gradient
        return replace(once, values=WeightedSum(once.values, weight).mean)

    return {name: one(gradient) for name, gradient in rows.items()}
