"""Run a per-replica function over stacked trees: `shard_map` on devices, `vmap` without."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..tree import Staged, parts_of, reshaped
from ._axes import axis_names
from ._build import VirtualMesh

AnyMesh = Mesh | VirtualMesh
"""Real devices, or virtual replicas under `vmap`."""

Role = Literal["stacked", "device", "batch", "shared"]
"""How an argument or result relates to the replicas.

`"stacked"`: leading axis of size replicas, which the function does not see. `"device"`: likewise,
of size replicas times inner axes. `"batch"`: leading dimension split over replicas and inner axes.
`"shared"`: the same for all.
"""

Roles = Any
"""A `Role`, or a tree of them: a prefix of the tree that has these roles."""


def replica_count(owner: str, mesh: AnyMesh, axis_name: AxisName) -> int:
    """Replicas of `mesh` along `axis_name`; `ValueError` for an axis it does not have."""
    count = 1
    for name in axis_names(axis_name):
        if name not in mesh.shape:
            raise ValueError(
                f"{owner}: `axis_name` {name!r} is not an axis of `mesh`, which has "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
        count *= mesh.shape[name]
    return count


def model_axes(tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> frozenset[str]:
    """Axes of `mesh`, `axis_name` apart, over which leaves of `tree` are sharded.

    They lie inside a replica (FSDP, tensor parallel, stages) and stay automatic.
    """
    found: set[str] = set()
    # jax drops axes of size 1 from shardings, and a model may have one stage.
    found.update(x.packing.axis_name for x in parts_of(tree, Staged))
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            for entry in sharding.spec:
                found.update(entry if isinstance(entry, tuple) else (entry,))
    return frozenset(found & set(mesh.axis_names)) - set(axis_names(axis_name))


def map_replicas(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh | AbstractMesh,
    axis_name: AxisName,
    in_roles: tuple[Roles, ...],
    out_roles: Roles = "stacked",
    automatic: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Map `fn`, written for one replica, over the axes of `mesh`.

    Args:
      fn: takes one tree per role; inside it all axes of `mesh` are bound, `automatic` ones apart.
      mesh: real devices, virtual, or abstract (to trace and lower only).
      axis_name: the replica axis.
      in_roles: a `Role` per argument, or a tree of them that is a prefix of it.
      out_roles: of the results, likewise.
      automatic: axes inside a replica that the compiler handles.
      check_vma: as of `jax.shard_map`; without it no sum over an axis is added on the way back.

    Returns:
      A function of stacked trees, to be called under `jax.jit`.

    Communication: none of its own.
    """
    if isinstance(mesh, VirtualMesh):
        return _map_virtual(fn, mesh, axis_name, in_roles, out_roles)
    replicas = axis_names(axis_name)
    inner = tuple(a for a in mesh.axis_names if a not in replicas and a not in automatic)
    everywhere = P((*replicas, *inner))
    specs: dict[Role, P] = {
        "stacked": P(replicas),
        "device": everywhere,
        "batch": everywhere,
        "shared": P(),
    }

    def per_device(*args: PyTree) -> PyTree:
        return _with_roles(_add_axis, out_roles, fn(*_with_roles(_drop_axis, in_roles, args)))

    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=jax.tree.map(specs.__getitem__, in_roles),
        out_specs=jax.tree.map(specs.__getitem__, out_roles),
        axis_names={*replicas, *inner},
        check_vma=check_vma,
    )
    if set(mesh.axis_types) != {AxisType.Auto, AxisType.Explicit}:
        return mapped
    return lambda *args: jax.tree.map(_as_typed, mapped(*args))


def _as_typed(x: jax.Array) -> jax.Array:
    """`x` laid out over Explicit axes as its type says.

    Where other axes are Auto, jax 0.10 leaves the results of a `shard_map` whole, whatever theirs.
    """
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(x, sharding) if any(sharding.spec) else x


def _with_roles(change: Callable[[PyTree, Role], PyTree], roles: Roles, tree: PyTree) -> PyTree:
    """`change` of every part of a tree that has one role."""
    return jax.tree.map(lambda role, part: change(part, role), roles, tree)


def _drop_axis(tree: PyTree, role: Role) -> PyTree:
    """A device's block of a stacked tree without its leading axis of size 1."""
    if role not in ("stacked", "device"):
        return tree
    return jax.tree.map(lambda x: reshaped(x, x.shape[1:]), tree)


def _add_axis(tree: PyTree, role: Role) -> PyTree:
    if role not in ("stacked", "device"):
        return tree
    return jax.tree.map(lambda x: reshaped(x, (1, *x.shape)), tree)


def _map_virtual(
    fn: Callable[..., Any],
    mesh: VirtualMesh,
    axis_name: AxisName,
    in_roles: tuple[Roles, ...],
    out_roles: Roles,
) -> Callable[..., Any]:
    """Nested `vmap`s, replica axes outside, on arguments whose leading axis is split to match."""
    replicas = axis_names(axis_name)
    order = (*replicas, *(a for a in mesh.axis_names if a not in replicas))
    sizes = [mesh.shape[a] for a in order]
    mapped = fn
    for name, size in reversed(list(zip(order, sizes, strict=True))):
        in_axes = {"stacked": 0 if name in replicas else None, "device": 0, "batch": 0}
        mapped = jax.vmap(
            mapped,
            in_axes=jax.tree.map(in_axes.get, in_roles),
            axis_name=name,
            axis_size=size,
        )
    # How many of the axes a leading dimension of all runs over.
    num_axes = {"stacked": len(replicas), "device": len(sizes), "shared": 0}

    def split(tree: PyTree, role: Role) -> PyTree:
        if role == "shared":
            return tree
        lead = (*sizes, -1) if role == "batch" else tuple(sizes[: num_axes[role]])
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), tree)

    def join(tree: PyTree, role: Role) -> PyTree:
        # Stacked results are equal over inner axes, and shared ones over all: keep the first.
        kept = num_axes[role]

        def merge(x: jax.Array) -> jax.Array:
            x = x[(slice(None),) * kept + (0,) * (len(sizes) - kept)]
            return x.reshape(math.prod(x.shape[:kept]), *x.shape[kept:]) if kept else x

        return jax.tree.map(merge, tree)

    return lambda *args: _with_roles(join, out_roles, mapped(*_with_roles(split, in_roles, args)))
