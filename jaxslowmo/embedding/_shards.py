"""Functions that make and place each device's part of the stored tables, and run on it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    VirtualMesh,
    axis_names,
    map_replicas,
    replica_count,
    replicate,
    roles_of_batch,
)
from ..tree import reshaped
from ._embeddings import Embeddings

Kinds = Any
"""How arguments or results are split over the devices of a replica: a tree prefix of kinds.

`"whole"`: equal on all devices. `"device"`: different on each device, stacked along a leading axis
outside. `"batch"`: a batch, whose leaves are split along the leading dimension; those that all
examples share are equal on all devices. `"shared"`: such a leaf. Or a `PartitionSpec` over the
axis.
"""


def on_shards(
    axis: str | None, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
) -> Any:
    """Run `fn` on each device's parts along an axis that is not bound yet, and return its results.

    Args:
      axis: axis over which the tables of a replica are sharded; None: it is already bound, or there
        is none, and every value is this device's part.
      fn: function of each device's parts of the arguments; `axis` is bound in it.
      *args: arguments for the whole replica.
      kinds: kinds of the arguments.
      out: kinds of the results.

    Communication: whatever `fn` communicates.
    """
    if axis is None:
        return fn(*args)

    pairs = zip(args, kinds, strict=True)
    kinds = tuple(
        "whole" if x is None else roles_of_batch(x) if kind == "batch" else kind
        for x, kind in pairs
    )

    def on_one(*args: Any) -> Any:
        local = _reshaped(args, kinds, lambda x: x.shape[1:])
        return _reshaped(fn(*local), out, lambda x: (1, *x.shape))

    def spec_of(kind: str | P) -> P:
        return kind if isinstance(kind, P) else P(axis) if kind in ("device", "batch") else P()

    in_specs, out_specs = jax.tree.map(spec_of, (kinds, out), is_leaf=_is_kind)
    mapped = jax.shard_map(
        on_one, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False
    )
    return mapped(*args)


def _is_kind(x: Any) -> bool:
    return isinstance(x, str | P)


def _reshaped(tree: Any, kinds: Kinds, shape: Callable[[jax.Array], tuple[int, ...]]) -> Any:
    """Return `tree` with arrays of the kind `"device"` reshaped."""

    def change(kind: str | P, part: Any) -> Any:
        if kind != "device":
            return part
        return jax.tree.map(lambda x: reshaped(x, shape(x)), part)

    return jax.tree.map(change, kinds, tree, is_leaf=_is_kind)


def place_tables(
    stored: PyTree, embeddings: Embeddings, nested: str | None, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """Return the same stored tables for all replicas; each device receives only its part.

    Args:
      stored: whole arrays by name, as `Embeddings.write` makes them.
      embeddings: tables of the step.
      nested: axis over which a replica's tables are sharded; None for tables on one device.
      mesh: mesh of the step.
      axis_name: name of the replica axis or axes.

    Raises:
      ValueError: arrays of other names or shapes.

    Communication: none.
    """
    stores = embeddings.layout().stores
    shapes = {name: (store.num_rows, store.dim) for name, store in stores.items()}
    actual = {name: jnp.shape(x) for name, x in stored.items()} if isinstance(stored, dict) else {}
    if shapes != actual:
        raise ValueError(
            f"`params` must hold stored tables of the shapes {shapes}, as step.embeddings.write("
            f"tables) makes them, got {actual or type(stored).__name__}."
        )
    dtypes = {name: jnp.dtype(store.dtype) for name, store in stores.items()}
    if nested is None:
        arrays = {name: jnp.asarray(x, dtypes[name]) for name, x in stored.items()}
        return replicate(arrays, mesh=mesh, axis_name=axis_name)
    count = replica_count("init", mesh, axis_name)
    shardings = _shardings(embeddings, mesh, axis_name)

    def placed(name: str, whole: np.ndarray) -> jax.Array:
        def of_device(index: Any) -> np.ndarray:
            return whole[index[1:]][None].astype(dtypes[name])

        return jax.make_array_from_callback((count, *whole.shape), shardings[name], of_device)

    return {name: placed(name, np.asarray(x)) for name, x in stored.items()}


def _shardings(embeddings: Embeddings, mesh: Any, axis_name: AxisName) -> dict[str, NamedSharding]:
    """Return the shardings of the stored tables of all replicas."""
    first = axis_names(axis_name)
    return {n: NamedSharding(mesh, P(first, *spec)) for n, spec in embeddings.specs.items()}


@functools.lru_cache(maxsize=16)
def table_maker(
    embeddings: Embeddings, nested: str | None, mesh: AnyMesh, axis_name: AxisName
) -> Callable[[jax.Array], PyTree]:
    """Return a function from key data to new tables of all replicas, equal on them.

    Each device makes only its own part.

    Communication: none.
    """

    def per_replica(bits: jax.Array) -> PyTree:
        def make(bits: jax.Array) -> PyTree:
            return embeddings.init_local(jax.random.wrap_key_data(bits))

        return on_shards(nested, make, bits, kinds=("whole",), out=embeddings.specs)

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
