"""Run a per-replica function over stacked trees: `shard_map` on devices, `vmap` without."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, PyTree
from ..tree import reshaped
from ._axes import axis_names
from ._build import VirtualMesh

AnyMesh = Mesh | VirtualMesh
"""Real devices, or virtual replicas under `vmap`."""

Role = Literal["stacked", "batch", "shared"]
"""How an argument or result relates to the replicas.

`"stacked"`: leading axis of size replicas, which the function does not see. `"batch"`: leading
dimension split over replicas and inner axes. `"shared"`: the same for all.
"""


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

    They lie inside a replica (FSDP, tensor parallel) and stay automatic.
    """
    found: set[str] = set()
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
    in_roles: tuple[Role, ...],
    out_roles: Role | tuple[Role, ...] = "stacked",
    automatic: frozenset[str] = frozenset(),
) -> Callable[..., Any]:
    """Map `fn`, written for one replica, over the axes of `mesh`.

    Args:
      fn: takes one tree per role; inside it all axes of `mesh` are bound, `automatic` ones apart.
      mesh: real devices, virtual, or abstract (to trace and lower only).
      axis_name: the replica axis.
      in_roles: one `Role` per argument.
      out_roles: roles of the results, as the tree prefix that `fn` returns.
      automatic: axes inside a replica that the compiler handles.

    Returns:
      A function of stacked trees, to be called under `jax.jit`.

    Communication: none of its own.
    """
    if isinstance(mesh, VirtualMesh):
        return _map_virtual(fn, mesh, axis_name, in_roles, out_roles)
    replicas = axis_names(axis_name)
    inner = tuple(a for a in mesh.axis_names if a not in replicas and a not in automatic)
    specs: dict[Role, P] = {"stacked": P(replicas), "batch": P((*replicas, *inner)), "shared": P()}

    def per_device(*args: PyTree) -> PyTree:
        out = fn(*map(_drop_axis, args, in_roles))
        if isinstance(out_roles, str):
            return _add_axis(out, out_roles)
        return tuple(map(_add_axis, out, out_roles))

    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=tuple(specs[r] for r in in_roles),
        out_specs=(
            specs[out_roles] if isinstance(out_roles, str) else tuple(specs[r] for r in out_roles)
        ),
        axis_names={*replicas, *inner},
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


def _drop_axis(tree: PyTree, role: Role) -> PyTree:
    """A device's block of a stacked tree without its leading axis of size 1."""
    if role != "stacked":
        return tree
    return jax.tree.map(lambda x: reshaped(x, x.shape[1:]), tree)


def _add_axis(tree: PyTree, role: Role) -> PyTree:
    if role != "stacked":
        return tree
    return jax.tree.map(lambda x: reshaped(x, (1, *x.shape)), tree)


def _map_virtual(
    fn: Callable[..., Any],
    mesh: VirtualMesh,
    axis_name: AxisName,
    in_roles: tuple[Role, ...],
    out_roles: Role | tuple[Role, ...],
) -> Callable[..., Any]:
    """Nested `vmap`s, replica axes outside, on arguments whose leading axis is split to match."""
    replicas = axis_names(axis_name)
    order = (*replicas, *(a for a in mesh.axis_names if a not in replicas))
    sizes = [mesh.shape[a] for a in order]
    mapped = fn
    for name, size in reversed(list(zip(order, sizes, strict=True))):
        seen = {"stacked": name in replicas, "batch": True, "shared": False}
        mapped = jax.vmap(
            mapped,
            in_axes=tuple(0 if seen[r] else None for r in in_roles),
            axis_name=name,
            axis_size=size,
        )
    num_replica_axes = len(replicas)

    def split(tree: PyTree, role: Role) -> PyTree:
        if role == "shared":
            return tree
        if role == "stacked":
            lead = tuple(sizes[:num_replica_axes])
        else:
            lead = (*sizes, -1)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), tree)

    def join(tree: PyTree, role: Role) -> PyTree:
        # Results are equal over inner axes, and over all axes where shared: keep the first.
        kept = 0 if role == "shared" else num_replica_axes

        def merge(x: jax.Array) -> jax.Array:
            x = x[(slice(None),) * kept + (0,) * (len(sizes) - kept)]
            return x.reshape(math.prod(x.shape[:kept]), *x.shape[kept:]) if kept else x

        return jax.tree.map(merge, tree)

    def run(*args: PyTree) -> PyTree:
        out = mapped(*map(split, args, in_roles))
        if isinstance(out_roles, str):
            return join(out, out_roles)
        return tuple(map(join, out, out_roles))

    return run
