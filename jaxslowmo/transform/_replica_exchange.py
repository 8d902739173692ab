"""The axes of an exchange between replicas, and means of trees over them through flat buffers."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._support.checks import checked_int
from .._support.types import AxisName, PyTree, axis_names
from ..collectives import all_mean, coded_mean, relative_weight, total_weight
from ..collectives.codecs import Codec, Half
from ..mesh import axis_size, is_bound, only_over, specs_key, specs_of_leaves, typed_specs
from ..tree import Buffer, BufferPlan, TreePacking, plan_buffers


@dataclass(frozen=True)
class Exchange:
    """Settings of an exchange between replicas: over which axes, and in which form.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the L devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica. None: leaves are whole there, or their types have the layout (Explicit axes).
      bucket_bytes: size in bytes at which a flat buffer is closed; None: one buffer per dtype.
      codec: encoding of buffers that are wider than its dtype; None: none.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None

    def with_specs(self, param_specs: PyTree) -> "Exchange":
        """Return this exchange for leaves with these layouts, unless it has `param_specs`."""
        if self.param_specs is not None:
            return self
        return dataclasses.replace(self, param_specs=param_specs)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Called before tracing. Whether the axes are bound is checked at trace time.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def check_are_specs(owner: str, param_specs: PyTree | None) -> list[P]:
    """Return the leaves of a tree of specs; raise `ValueError` if it has leaves of other types."""
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, P))
    if wrong := [x for x in specs if not isinstance(x, P)]:
        raise ValueError(
            f"{owner}: `param_specs` must be a tree of PartitionSpec, got a leaf of type "
            f"{type(wrong[0]).__name__}."
        )
    return specs


def checked_bytes(owner: str, argument: str, size: object) -> int:
    """Return a size in bytes as an int; raise `ValueError` unless it is an integer >= 0."""
    return checked_int(f"{owner}: `{argument}` is a size in bytes and", size, 0)


def checked_exchange(
    owner: str,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> Exchange:
    """Return the `Exchange` of these arguments, which are checked.

    Raises:
      ValueError: axes that are no names, specs that are no `PartitionSpec`s or name the replica
        axis, a negative size, or a codec that is no `Codec`.
    """
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None:
        bucket_bytes = checked_bytes(owner, "bucket_bytes", bucket_bytes)
    specs = check_are_specs(owner, param_specs)
    replicas = set(axis_names(axis_name))
    if stacked := [x for x in specs if replicas & {n for e in x for n in axis_names(e or ())}]:
        raise ValueError(
            f"{owner}: `param_specs` are of one copy of the parameters and must not name the axis "
            f"of the replicas, {axis_name!r}, got {stacked[0]}. Off stacked leaves they are read "
            "as `P(*leaf.sharding.spec[1:])`."
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            f"{owner}: `codec` must be None or one of js.codecs, such as js.codecs.int8() or "
            f"js.codecs.float16(error_feedback=True), got {codec!r}."
        )
    return Exchange(axis_name, local_axis_name, param_specs, bucket_bytes, codec)


def packing_of(
    tree: PyTree, exchange: Exchange, dtype_of: Callable[[np.dtype], np.dtype] = np.dtype
) -> TreePacking:
    """Return the packing of trees like `tree` for an exchange, from a cache.

    Args:
      tree: tree of arrays or types.
      exchange: the exchange, of which `param_specs` and `bucket_bytes` are used. Without specs,
        layouts over Explicit axes are read from the types.
      dtype_of: function from the dtype of a leaf to the dtype in which it is sent; by default they
        are equal.

    Raises:
      ValueError: specs that do not fit the tree, or an axis that the context's mesh does not have.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # The key has the dtype that is sent, so that parameters in half precision and their float32
    # updates have one plan if both are sent in float32.
    types = tuple((leaf.shape, dtype_of(leaf.dtype)) for leaf in leaves)
    specs = exchange.param_specs
    specs = specs_key(typed_specs(tree) if specs is None else specs)
    # The context's mesh says which axes are manual, and their sizes.
    mesh = jax.sharding.get_abstract_mesh()
    return _planned(treedef, types, specs, exchange.bucket_bytes, mesh)


@functools.lru_cache(maxsize=128)
def _planned(
    treedef: Any,
    types: tuple[tuple[tuple[int, ...], np.dtype], ...],
    specs: Any,
    bucket_bytes: int | None,
    mesh: Hashable,
) -> TreePacking:
    del mesh  # a key for the cache only: `planned_by_group` reads it from the context
    like = [jax.ShapeDtypeStruct(*each) for each in types]
    structure, leaves = specs
    limits = None if bucket_bytes is None else (bucket_bytes,)
    specs = structure.unflatten(leaves)
    return planned_by_group(
        treedef, like, specs, lambda blocks, place: plan_buffers(blocks, limits=limits)
    )


def planned_by_group(
    treedef: Any,
    leaves: Sequence[Any],
    specs: PyTree | None,
    plan: Callable[[list[Any], Mapping[int, int]], BufferPlan],
) -> TreePacking:
    """Return the packing of a tree by a plan for each group of leaves sharded over the same axes.

    Args:
      treedef: structure of the tree.
      leaves: the tree's arrays or types.
      specs: `PartitionSpec` per leaf, or prefix of the tree, or None for whole leaves.
      plan: the plan for a group; see `TreePacking.planned`.

    Raises:
      ValueError: specs that do not fit the tree, or an axis that the context's mesh does not have.
    """
    # One spec may stand for a whole subtree, as in jit and shard_map.
    try:
        of_leaves = specs_of_leaves(specs, treedef.unflatten(leaves))
    except ValueError as error:
        raise ValueError(
            "`param_specs` must be a tree of PartitionSpec with the structure of the parameters, "
            f"or a prefix of it: {error}"
        ) from None
    mesh = jax.sharding.get_abstract_mesh()
    inside = [_automatic(spec, mesh) for spec in of_leaves]
    return TreePacking.planned(treedef, leaves, inside, mesh.shape, plan)


def _automatic(spec: P, mesh: Any) -> P:
    """Return `spec` over the automatic axes that split a leaf: it is a block along manual ones."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    splits = set()
    for name in {name for entry in spec for name in axis_names(entry or ())}:
        if name not in types and not (is_bound(name) and axis_size(name) == 1):
            raise ValueError(
                f"`param_specs` names axis {name!r}, which the mesh here does not have "
                f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
            )
        kind = types.get(name, AxisType.Manual)
        # The type of an array names an Explicit axis also where its size is 1.
        if kind == AxisType.Explicit or (kind == AxisType.Auto and mesh.shape[name] > 1):
            splits.add(name)
    return only_over(spec, frozenset(splits))


def replica_mean(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> PyTree:
    """Return the mean of a tree over the replicas, in the leaves' dtypes, through flat buffers.

    With a weight it is the weighted mean, or `tree` itself if all weights are 0. With a codec each
    replica's residual is added, so replicas then differ by it. `note_buffers` reports `role`, which
    says what the buffers are exchanged for.

    Communication: one all-reduce per buffer over `exchange.axis_name`, in the dtype of a codec that
      narrows it; with `local_axis_name` 1/L of each per device, and an all-gather over that axis;
      with a weight, before, one of 8 bytes. None for a tree without leaves.
    """
    if not jax.tree.leaves(tree):
        return tree
    axes, local, codec = exchange.axis_name, exchange.local_axis_name, exchange.codec

    def mean_of(
        buffer: Buffer,
        flat: jax.Array,
        factor: jax.Array | None = None,
        anyone: jax.Array | None = None,
    ) -> jax.Array:
        del buffer
        # Each of L devices inside a replica sends its part: N bytes leave a replica, not L * N.
        if isinstance(codec, Half):
            mean, residual = coded_mean(flat, codec, axes, local, factor=factor)
            mean += residual
        else:
            mean = all_mean(flat, axes, local, factor=factor)
        # If all replicas have run out of data the mean is 0 / 0: keep the values.
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    return packing_of(tree, exchange).through(mean_of, tree, *_shares(exchange, weight), role=role)


def _shares(exchange: Exchange, weight: jax.Array | None) -> list[jax.Array]:
    """Return this replica's factor, and whether any weight is above 0; [] without weights.

    Communication: with a weight one all-reduce of 8 bytes over `exchange.axis_name`.
    """
    if weight is None:
        return []
    total = total_weight(weight, exchange.axis_name)
    return [relative_weight(weight, total, exchange.axis_name), total.weight > 0]
