"""The stored tables of all replicas: made anew, or given."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...mesh import (
    AnyMesh,
    VirtualMesh,
    axis_names,
    map_replicas,
    replica_count,
    replicate,
    vary_over,
)
from .._embeddings import Embeddings
from ._shards import on_shards


def given_tables(
    stored: PyTree, embeddings: Embeddings, nested: str | None, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """The same stored tables for all replicas: each device is given its own part alone.

    Args:
      stored: whole arrays by name, as `Embeddings.write` makes them.
      embeddings: of the step.
      nested: the axis between whose devices they are sharded, where there are several.
      mesh: of the step.
      axis_name: of its replicas.

    Raises:
      ValueError: arrays of other names or shapes.

    Communication: none.
    """
    stores = embeddings.layout().stores
    wanted = {name: (store.num_rows, store.dim) for name, store in stores.items()}
    given = {name: jnp.shape(x) for name, x in stored.items()} if isinstance(stored, dict) else {}
    if wanted != given:
        raise ValueError(
            f"`params` must hold stored tables of the shapes {wanted}, as step.embeddings.write("
            f"tables) makes them, got {given or type(stored).__name__}."
        )
    typed = {name: jnp.dtype(store.dtype) for name, store in stores.items()}
    if nested is None:
        own = {name: jnp.asarray(x, typed[name]) for name, x in stored.items()}
        return replicate(own, mesh=mesh, axis_name=axis_name)
    count = replica_count("init", mesh, axis_name)
    lies = _shardings(embeddings, mesh, axis_name)

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
def table_maker(
    embeddings: Embeddings, nested: str | None, mesh: AnyMesh, axis_name: AxisName
) -> Callable[[jax.Array], PyTree]:
    """A function of the data of a key: new tables of all replicas, equal on them.

    Each device makes its own part.

    Communication: none.
    """

    def per_replica(bits: jax.Array) -> PyTree:
        def made(bits: jax.Array) -> PyTree:
            return embeddings.init_local(jax.random.wrap_key_data(bits))

        local = on_shards(nested, made, bits, kinds=("whole",), out=embeddings.specs)
        return vary_over(local, axis_names(axis_name))

    mapped = map_replicas(
        per_replica,
        mesh=mesh,
        axis_name=axis_name,
        in_roles=("shared",),
        automatic=frozenset() if nested is None else frozenset({nested}),
    )
    if nested is None or isinstance(mesh, VirtualMesh):
        return jax.jit(mapped)
    return jax.jit(mapped, out_shardings=_shardings(embeddings, mesh, axis_name))
