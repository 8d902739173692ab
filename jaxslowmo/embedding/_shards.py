"""Each device's own part of the stored tables: made, given, and what a replica does on it."""

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
    vary_over,
)
from ..tree import reshaped
from ._embeddings import Embeddings

Kinds = Any
"""How arguments and results relate to the devices of a replica: a tree, a prefix of theirs.

`"whole"`: the same on all of them. `"device"`: another on each, stacked outside along a leading
axis. `"batch"`: split along the leading dimension. A `PartitionSpec` over the axis says more.
"""


def on_shards(
    axis: str | None, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
) -> Any:
    """`fn` of each device's own parts along an axis that the compiler has.

    Args:
      axis: between whose devices the tables of a replica are sharded; None: it is bound already,
        or there is none, and every value is this device's own.
      fn: function of the arguments; in it `axis` is bound.
      *args: of the replica.
      kinds: of the arguments.
      out: of the results.

    Communication: that of `fn`.
    """
    if axis is None:
        return fn(*args)

    kinds = tuple("whole" if x is None else kind for x, kind in zip(args, kinds, strict=True))

    def on_one(*args: Any) -> Any:
        own = _reshaped(args, kinds, lambda x: x.shape[1:])
        return _reshaped(fn(*own), out, lambda x: (1, *x.shape))

    def specs(kinds: Kinds) -> Any:
        known = {"whole": P(), "device": P(axis), "batch": P(axis)}
        return jax.tree.map(
            lambda kind: kind if isinstance(kind, P) else known[kind], kinds, is_leaf=_is_kind
        )

    return jax.shard_map(on_one, in_specs=specs(kinds), out_specs=specs(out), axis_names={axis})(
        *args
    )


def _is_kind(x: Any) -> bool:
    return isinstance(x, str | P)


def _reshaped(tree: Any, kinds: Kinds, shape: Callable[[jax.Array], tuple[int, ...]]) -> Any:
    """`tree`, whose arrays of the kind `"device"` have another shape."""

    def change(kind: str | P, part: Any) -> Any:
        if kind != "device":
            return part
        return jax.tree.map(lambda x: reshaped(x, shape(x)), part)

    return jax.tree.map(change, kinds, tree, is_leaf=_is_kind)


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
