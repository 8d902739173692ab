"""Meshes of devices or of virtual replicas, functions of one replica mapped over them, and kept."""

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import as_int
from .._support.types import AxisName, PyTree
from ..tree import Staged, parts_of, reshaped
from ._axes import axis_names


def slice_major_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices of several slices as an array of the shape of `axes`.

    Args:
      axes: size by name, outermost first; as many devices as there are. The outermost axis runs
        over the slices. Where it is larger than their number, groups of its members share a slice;
        where it is smaller, the next axis runs over the slices that each of its members has.
      devices: the devices slice by slice, equally many of each.

    Returns:
      An array of devices, in the order of their slices when flat; within a slice the order follows
      the hardware topology, as in `jax.make_mesh`.

    Raises:
      ValueError: slices that give different numbers of devices, or an axis that would split one
        unevenly.

    Communication: none.
    """
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(_slice_of(device), []).append(device)
    counts = {index: len(members) for index, members in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of slice {index}" for index, count in counts.items())
        raise ValueError(
            f"`axes` {dict(axes)} take {math.prod(axes.values())} devices, {listed}: a mesh over "
            "several slices needs equally many of each. Choose sizes whose product fills whole "
            "slices, or pass `devices`."
        )
    between = _sizes_between(axes, len(found))
    within = [size // outer for size, outer in zip(axes.values(), between, strict=True)]
    grids = [
        jax.make_mesh(
            tuple(within), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=members
        ).devices
        for members in found.values()
    ]
    # (outer sizes, inner sizes) -> each axis with its outer part first.
    stacked = np.stack(grids).reshape(*between, *within)
    order = [place for i in range(len(axes)) for place in (i, i + len(axes))]
    return stacked.transpose(order).reshape(tuple(axes.values()))


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _sizes_between(axes: Mapping[str, int], slices: int) -> list[int]:
    """The part of each axis that runs over slices, outermost axes first.

    >>> _sizes_between({"replica": 8, "device": 4}, 4)
    [4, 1]
    >>> _sizes_between({"replica": 2, "device": 16}, 4)
    [2, 2]
    """
    parts, left = [], slices
    for name, size in axes.items():
        part = math.gcd(size, left)
        if part not in (size, left):
            raise ValueError(
                f"`axes` {dict(axes)}: outer axes run over the {slices} slices, so the size of "
                f"{name!r} must divide {left} or be a multiple of it, got {size}; it would split a "
                "slice unevenly."
            )
        parts.append(part)
        left //= part
    return parts


@dataclass(frozen=True)
class VirtualMesh:
    """Axes without devices: replicas run under `vmap(axis_name=...)` on the default device.

    Takes the place of a `jax.sharding.Mesh` in every function of this library that has a `mesh`
    argument. Nothing is sent; collectives become reductions over a batch dimension.

    Attributes:
      axes: `(name, size)` pairs, outermost first.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name."""
        return MappingProxyType(dict(self.axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)


def _checked_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return `axes` with plain ints; raise `ValueError` for other sizes, or none."""
    if not axes:
        raise ValueError('`axes` must name at least one axis, such as {"replica": 4}.')
    sizes: dict[str, int] = {}
    for name, size in axes.items():
        number = as_int(size, 1)
        if number is None:
            raise ValueError(
                f"`axes`: the size of axis {name!r} must be an int >= 1, got {size!r}."
            )
        sizes[name] = number
    return sizes


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of real devices with Auto axes.

    `jax.make_mesh` makes Explicit axes by default and then rejects inputs that are not placed;
    meshes of either kind work with the rest of this library.

    Over several TPU slices, which `jax.make_mesh` refuses, the outer axes run over the slices:
    with 4 slices `{"replica": 4, "device": 16}` makes each a replica, `{"replica": 8, "device": 8}`
    each two replicas, and `{"replica": 2, "device": 32}` gives each replica two slices.

    Args:
      axes: size by name, outermost (slowest network) first: `{"replica": 4, "device": 2}`.
      devices: devices to use; default all of `jax.devices()`, of which the first ones (slice by
        slice) are taken.

    Returns:
      A `jax.sharding.Mesh`; device order follows the hardware topology, as in `jax.make_mesh`, and
      slices stay together.

    Raises:
      ValueError: an empty mapping, a size below 1, fewer devices than the sizes' product, or sizes
        that would split a slice unevenly.

    Communication: none.
    """
    axes = _checked_axes(axes)
    found = list(jax.devices() if devices is None else devices)
    needed = math.prod(axes.values())
    if len(found) < needed:
        raise ValueError(
            f"`axes` {axes} need {needed} devices, found {len(found)} "
            f"({found[0].platform if found else 'none'}). On CPU, more can be made with "
            f'`jax.config.update("jax_num_cpu_devices", {needed})` before jax touches a device; '
            "`js.virtual_mesh` runs replicas on one device."
        )
    types = (AxisType.Auto,) * len(axes)
    chosen = sorted(found, key=_slice_of)[:needed]
    if len(set(map(_slice_of, chosen))) > 1:
        return Mesh(slice_major_devices(axes, chosen), tuple(axes), axis_types=types)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=chosen)


def virtual_mesh(axes: Mapping[str, int]) -> VirtualMesh:
    """A mesh of virtual replicas, `vmap`ped on the default device.

    Args:
      axes: size by name, outermost first: `{"replica": 4}`.

    Returns:
      A `VirtualMesh`, usable wherever this library takes `mesh`.

    Raises:
      ValueError: an empty mapping or a size below 1.

    Communication: none, ever.
    """
    return VirtualMesh(tuple(_checked_axes(axes).items()))


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
        # A device's block of a stacked tree has a leading axis of size 1.
        own = _stacked_as(lambda x: x.shape[1:], in_roles, args)
        return _stacked_as(lambda x: (1, *x.shape), out_roles, fn(*own))

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


def _stacked_as(
    shape: Callable[[jax.Array], tuple[int, ...]], roles: Roles, tree: PyTree
) -> PyTree:
    """A tree of these roles, in which leaves that are stacked have other shapes."""

    def change(part: PyTree, role: Role) -> PyTree:
        if role not in ("stacked", "device"):
            return part
        return jax.tree.map(lambda x: reshaped(x, shape(x)), part)

    return _with_roles(change, roles, tree)


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


_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def kept_with(
    fn: Callable[..., Any], key: Hashable, make: Callable[[Callable[..., Any]], Any]
) -> Any:
    """`make(fn)`, made at the first call with this `fn` and `key`.

    A transform may hold arrays, so nothing here keeps it alive: what is made goes with `fn`, and
    `make` is given a stand-in that only refers to it. A `fn` that cannot be referred to so, or a
    key without a hash, is made again at each call.

    Args:
      fn: the function that the program runs.
      key: all else that it depends on; must not hold arrays.
      make: makes the program from `fn`.

    Communication: none.
    """
    try:
        programs = _programs.setdefault(fn, {})
        program = programs.get(key)
    except TypeError:
        return make(fn)
    if program is None:
        program = programs[key] = make(_stand_in(weakref.ref(fn)))
    return program


def _stand_in(reference: weakref.ref[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        fn = reference()
        assert fn is not None, "who asks for the program holds its function"
        return fn(*args)

    return call
