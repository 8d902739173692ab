"""Meshes of devices or of virtual replicas, and functions of one replica mapped over them."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, TypeGuard, overload

import jax
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, checked_int
from .._support.types import AxisName, PyTree, axis_names
from ..tree import Staged, parts_of, reshape
from ._axes import restrict_spec


def slice_major_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Return the devices of several slices as an array of the shape of `axes`.

    Args:
      axes: size by name, outermost first; the product of sizes is the number of devices. The
        outermost axis runs over the slices. If it is larger than their number, groups of its
        members share a slice; if it is smaller, the next axis runs over the slices of each member.
      devices: the devices slice by slice, equally many of each.

    Returns:
      An array of devices that holds one slice after another when flattened; within a slice the
      order follows the hardware topology, as in `jax.make_mesh`.

    Raises:
      ValueError: slices with different numbers of devices, or an axis that would split a slice
        unevenly.

    Communication: none.
    """
    counts = Counter(map(_slice_of, devices))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of slice {index}" for index, count in counts.items())
        raise ArgumentError(
            "axes",
            f"`axes` {dict(axes)} take {listed}, and a mesh over several slices needs equally many "
            "of each: choose sizes whose product fills whole slices, or pass `devices`.",
        )
    between = _sizes_between(axes, len(counts))
    within = [size // outer for size, outer in zip(axes.values(), between, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, between, devices, allow_split_physical_axes=True
    )


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _sizes_between(axes: Mapping[str, int], slices: int) -> list[int]:
    """Return the part of each axis's size that runs over slices, outermost axes first.

    >>> _sizes_between({"replica": 8, "device": 4}, 4)
    [4, 1]
    >>> _sizes_between({"replica": 2, "device": 16}, 4)
    [2, 2]
    """
    parts, rest = [], slices
    for name, size in axes.items():
        part = math.gcd(size, rest)
        if part not in (size, rest):
            raise ArgumentError(
                "axes",
                f"`axes` {dict(axes)}: outer axes run over the {slices} slices, so the size of "
                f"{name!r} must divide {rest} or be a multiple of it, got {size}.",
            )
        parts.append(part)
        rest //= part
    return parts


@dataclass(frozen=True, eq=False)
class VirtualMesh:
    """Axes that are larger than their devices: replicas run under `vmap(axis_name=...)`.

    Every function of this library with a `mesh` argument takes one in place of a
    `jax.sharding.Mesh`. Collectives become reductions over a batch dimension, which the compiler
    splits over the devices: on one, nothing is sent.

    Attributes:
      axes: `(name, size)` pairs, outermost first.
      devices: the devices over which the outermost axis is spread, equally many positions on each;
        None: the default device when one is first needed.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...] | None = None

    @cached_property
    def device_mesh(self) -> Mesh:
        """The mesh of the devices, whose one axis has the outermost axis' name."""
        devices = self.devices
        if devices is None:
            with jax.ensure_compile_time_eval():
                devices = tuple(jax.device_put(np.int32(0)).devices())
        return Mesh(np.array(devices), self.axis_names[:1], axis_types=(AxisType.Auto,))

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, VirtualMesh)
        return is_one and (self.axes, self.device_mesh) == (other.axes, other.device_mesh)

    def __hash__(self) -> int:
        return hash((self.axes, self.device_mesh))

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name."""
        return MappingProxyType(dict(self.axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def is_multi_process(self) -> bool:
        """Whether the devices are of several processes: they never are."""
        return False


def _checked_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return `axes` with plain ints; raise `ValueError` for other sizes or an empty mapping."""
    if not isinstance(axes, Mapping) or not axes:
        raise ArgumentError(
            "axes",
            f'`axes` must name at least one axis with its size, as {{"replica": 4}}, got {axes!r}.',
        )
    size_of = "`axes`: the size of axis {!r}"
    return {name: checked_int(size_of.format(name), size, 1) for name, size in axes.items()}


@overload
def make_mesh(axes: Mapping[str, int], devices: None = None) -> Mesh: ...
@overload
def make_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> "AnyMesh": ...
def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> "AnyMesh":
    """Make a `jax.sharding.Mesh` of devices, whose axes have the type Auto.

    `jax.make_mesh` makes Explicit axes by default and then rejects inputs that are not placed;
    meshes of either kind work with the rest of this library.

    `jax.make_mesh` rejects devices of several TPU slices. Here the outer axes run over the slices.
    With 4 slices, `{"replica": 4, "device": 16}` makes each slice a replica,
    `{"replica": 8, "device": 8}` puts two replicas on each slice, and
    `{"replica": 2, "device": 32}` gives each replica two slices.

    Args:
      axes: size by name, outermost (slowest network) first: `{"replica": 4, "device": 2}`.
      devices: devices to use, of which the first ones (slice by slice) are taken; the default is
        `jax.devices()`. Fewer than the sizes' product hold several replicas each, if their number
        divides the size of the outermost axis.

    Returns:
      A `jax.sharding.Mesh`; device order follows the hardware topology, as in `jax.make_mesh`, and
      slices stay together. Of fewer `devices`, `js.virtual_mesh(axes, devices)`.

    Raises:
      ValueError: an empty mapping, a size below 1, too few devices, or sizes that would split a
        slice unevenly; what `js.virtual_mesh` raises.

    Communication: none.
    """
    axes = _checked_axes(axes)
    available = list(jax.devices() if devices is None else devices)
    needed = math.prod(axes.values())
    if len(available) < needed:
        is_given = devices is not None and len(available) > 0
        if is_given and next(iter(axes.values())) % len(available) == 0:
            return virtual_mesh(axes, available)
        raise ArgumentError(
            "axes",
            f"`axes` {axes} need {needed} devices, found {len(available)}: `js.virtual_mesh` runs "
            f'several on one, and `jax.config.update("jax_num_cpu_devices", {needed})` makes more.',
        )
    types = (AxisType.Auto,) * len(axes)
    chosen = sorted(available, key=_slice_of)[:needed]
    if len(set(map(_slice_of, chosen))) > 1:
        return Mesh(slice_major_devices(axes, chosen), tuple(axes), axis_types=types)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=chosen)


def virtual_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> VirtualMesh:
    """Make a mesh of virtual replicas, which run under `vmap`, several on a device.

    Args:
      axes: size by name, outermost first: `{"replica": 4}`.
      devices: the devices over which the outermost axis is spread, in its order: with 8 replicas
        on 4 devices the first device holds replicas 0 and 1. The default, None, is the default
        device, found when it is first needed.

    Returns:
      A `VirtualMesh`, usable wherever this library takes `mesh`.

    Raises:
      ValueError: an empty mapping or a size below 1; a number of devices that does not divide the
        size of the outermost axis; devices that are not distinct, or of another process.

    Communication: none; when replicas exchange, none on one device, and what the compiler makes of
      reductions over the replicas on several.
    """
    axes = _checked_axes(axes)
    if devices is None:
        return VirtualMesh(tuple(axes.items()))
    devices = tuple(devices)
    name, size = next(iter(axes.items()))
    if not devices or size % len(devices):
        raise ValueError(
            f"`devices`: their number must divide the size of the outermost axis {name!r}, {size}, "
            f"got {len(devices)}."
        )
    own = {device for device in devices if device.process_index == jax.process_index()}
    if len(own) < len(devices):
        raise ValueError(
            "`devices` of a virtual mesh must be distinct devices of this process, "
            f"{jax.process_index()}, got {[*devices]} of processes "
            f"{[device.process_index for device in devices]}."
        )
    return VirtualMesh(tuple(axes.items()), devices)


AnyMesh = Mesh | VirtualMesh
"""A device for each position of the axes, or several virtual replicas on each device."""


def device_mesh(mesh: AnyMesh) -> Mesh:
    """Return the mesh of the devices on which arrays lie; that of virtual replicas has one axis."""
    return mesh.device_mesh if isinstance(mesh, VirtualMesh) else mesh


def placement(mesh: AnyMesh, spec: P) -> NamedSharding:
    """Return where an array lies whose dimensions are split over these axes of `mesh`.

    The axes of virtual replicas that have no devices of their own split nothing.
    """
    if isinstance(mesh, VirtualMesh):
        mesh = mesh.device_mesh
        spec = restrict_spec(spec, frozenset(mesh.axis_names))
    return NamedSharding(mesh, spec)


def has_device_per_position(mesh: AnyMesh | AbstractMesh) -> TypeGuard[Mesh | AbstractMesh]:
    """Return whether each position of the axes has a device; else they are those of `vmap`s."""
    return not isinstance(mesh, VirtualMesh)


def mesh_text(mesh: AnyMesh) -> str:
    """Return the axes of a mesh and their sizes in words."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return axes if has_device_per_position(mesh) else f"virtual {axes}"


def with_device_per_position(mesh: AnyMesh) -> Mesh | AbstractMesh:
    """Return a mesh with a device for each position, perhaps only to trace and lower for."""
    if not isinstance(mesh, VirtualMesh):
        return mesh
    names, sizes = zip(*mesh.axes, strict=True)
    return AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))


MapWith = Literal["shard_map", "vmap"]
"""How a function of one replica is mapped over those of several devices."""

Role = Literal["stacked", "device", "batch", "shared"]
"""The role of an argument or a result of a mapped function: how it is split over replicas.

`"stacked"`: it has a leading axis of size replicas, which the function does not see. `"device"`:
it has a leading axis of size replicas times inner axes, which the function does not see.
`"batch"`: its leading dimension is split over replicas and inner axes. `"shared"`: it is the same
for all.
"""

Roles = Any
"""A `Role`, or a tree of them that is a prefix of the argument's or result's tree.

A `PartitionSpec` in the place of a role is `"stacked"` of arrays that are sharded inside a replica,
over mapped axes.
"""


def is_shared_leaf(x: Any) -> bool:
    """Return whether all examples share a leaf of a batch: it has no dimension, or one row.

    Args:
      x: a leaf of a batch that is split over several devices or microbatches.
    """
    return np.ndim(x) == 0 or np.shape(x)[0] == 1


def batch_roles(batch: PyTree) -> Roles:
    """Return the role of each leaf of a batch: `"shared"` where all examples share it."""
    if not any(map(is_shared_leaf, jax.tree.leaves(batch))):
        return "batch"
    return jax.tree.map(lambda x: "shared" if is_shared_leaf(x) else "batch", batch)


def replica_count(owner: str, mesh: AnyMesh, axis_name: AxisName) -> int:
    """Return the number of replicas of `mesh`; raise `ValueError` for an axis it does not have."""
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise ValueError(
            f"{owner}: `mesh` must be one that js.make_mesh or js.virtual_mesh makes, got {mesh!r}."
        )
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
    """Return the axes of `mesh` except `axis_name` over which leaves of `tree` are sharded.

    These axes are inside a replica (FSDP, tensor parallel, stages) and stay automatic.
    """
    axes: set[str] = set()
    # jax drops axes of size 1 from shardings, and a pipeline may have a single stage.
    axes.update(x.packing.axis_name for x in parts_of(tree, Staged))
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            axes.update(*map(axis_names, sharding.spec))
    return frozenset(axes & set(mesh.axis_names)) - set(axis_names(axis_name))


def map_replicas(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh | AbstractMesh,
    axis_name: AxisName,
    in_roles: tuple[Roles, ...],
    out_roles: Roles = "stacked",
    automatic: frozenset[str] = frozenset(),
    map_with: MapWith = "shard_map",
) -> Callable[..., Any]:
    """Map `fn`, written for one replica, over the axes of `mesh`.

    Args:
      fn: takes one tree per role; inside it all axes of `mesh` except `automatic` are bound.
      mesh: a mesh of devices, a `VirtualMesh`, or an abstract mesh (to trace and lower only).
      axis_name: the replica axis, or several.
      in_roles: a `Role` per argument, or a tree of them that is a prefix of the argument.
      out_roles: a `Role` per result, or a tree of them that is a prefix of the results.
      automatic: axes inside a replica that the compiler handles.
      map_with: `"shard_map"` maps the axes of replicas alone, so nothing in `fn` can communicate
        over them but what says so. `"vmap"` is `jax.vmap(spmd_axis_name=...)`, inside of which no
        axis is bound and `fn` may hold `shard_map`s with a mesh of their own; all axes inside a
        replica are then the compiler's. Replicas of one device are always in a `shard_map`.

    Returns:
      A function of stacked trees, to be called under `jax.jit`.

    jax does not track which values vary over an axis (`check_vma=False`), so `fn` means what it
    means under `pmap` and `vmap`: a loss may average itself over an axis, and a loop may start from
    a constant. What differs between devices is known from the roles, and never from types.

    Communication: that of `fn`.
    """
    replicas = axis_names(axis_name)
    if isinstance(mesh, VirtualMesh):
        in_roles, out_roles = jax.tree.map(
            lambda x: "stacked" if isinstance(x, P) else x, (in_roles, out_roles)
        )
        return _map_virtual(fn, mesh, replicas, in_roles, out_roles, automatic)
    if map_with == "vmap" and any(mesh.shape[a] > 1 for a in mesh.axis_names if a not in replicas):
        return _map_spmd(fn, mesh, replicas, in_roles, out_roles)
    inner = tuple(a for a in mesh.axis_names if a not in replicas and a not in automatic)
    everywhere = P((*replicas, *inner))
    specs = {"stacked": P(replicas), "device": everywhere, "batch": everywhere, "shared": P()}

    def per_device(*args: PyTree) -> PyTree:
        # A device's block of a stacked tree has a leading axis of size 1.
        local_args = _reshape_replica_axis(lambda x: x.shape[1:], in_roles, args)
        return _reshape_replica_axis(lambda x: (1, *x.shape), out_roles, fn(*local_args))

    in_specs, out_specs = jax.tree.map(
        lambda x: P(replicas, *x) if isinstance(x, P) else specs[x], (in_roles, out_roles)
    )
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*replicas, *inner},
        check_vma=False,
    )
    if set(mesh.axis_types) != {AxisType.Auto, AxisType.Explicit}:
        return mapped
    return lambda *args: jax.tree.map(_reshard_to_type, mapped(*args))


def _map_spmd(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    replicas: tuple[str, ...],
    in_roles: tuple[Roles, ...],
    out_roles: Roles,
) -> Callable[..., Any]:
    """Map `fn` by `jax.vmap(spmd_axis_name=...)`; leading axes of batches are split to match."""
    count = math.prod(mesh.shape[name] for name in replicas)
    # `axis_name=` of the same name beside it would make a psum over it silently wrong.
    mapped = jax.vmap(
        fn,
        in_axes=jax.tree.map(lambda role: None if role == "shared" else 0, in_roles),
        out_axes=jax.tree.map(lambda role: None if role == "shared" else 0, out_roles),
        spmd_axis_name=replicas,
    )

    def split(role: Role, tree: PyTree) -> PyTree:
        if role != "batch":
            return tree
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)

    def join(role: Role, tree: PyTree) -> PyTree:
        if role != "batch":
            return tree
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def call(*args: PyTree) -> PyTree:
        return jax.tree.map(join, out_roles, mapped(*jax.tree.map(split, in_roles, args)))

    return call


def _reshard_to_type(x: jax.Array) -> jax.Array:
    """Lay `x` out over Explicit axes as its type says.

    If other axes are Auto, jax 0.10 leaves the results of a `shard_map` whole despite their types.
    """
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(x, sharding) if any(sharding.spec) else x


def _reshape_replica_axis(
    shape: Callable[[jax.Array], tuple[int, ...]], roles: Roles, tree: PyTree
) -> PyTree:
    """Reshape the stacked leaves of a tree with these roles to `shape(leaf)`."""

    def change(role: Role, part: PyTree) -> PyTree:
        if role in ("batch", "shared"):
            return part
        return jax.tree.map(lambda x: reshape(x, shape(x)), part)

    return jax.tree.map(change, roles, tree)


def _map_virtual(
    fn: Callable[..., Any],
    mesh: VirtualMesh,
    replicas: tuple[str, ...],
    in_roles: tuple[Roles, ...],
    out_roles: Roles,
    automatic: frozenset[str],
) -> Callable[..., Any]:
    """Map `fn` by nested `vmap`s, replica axes outermost; leading axes are split to match."""
    inner = (a for a in mesh.axis_names if a not in replicas and a not in automatic)
    order = (*replicas, *inner)
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
    # The number of axes that the leading dimension of an argument or result runs over.
    num_axes = {"stacked": len(replicas), "device": len(sizes), "shared": 0}

    def split(role: Role, tree: PyTree) -> PyTree:
        if role == "shared":
            return tree
        lead = (*sizes, -1) if role == "batch" else tuple(sizes[: num_axes[role]])
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), tree)

    def join(role: Role, tree: PyTree) -> PyTree:
        # Stacked results are equal over inner axes and shared results over all: keep the first.
        kept = num_axes[role]

        def merge(x: jax.Array) -> jax.Array:
            x = x[(slice(None),) * kept + (0,) * (len(sizes) - kept)]
            return x.reshape(math.prod(x.shape[:kept]), *x.shape[kept:]) if kept else x

        return jax.tree.map(merge, tree)

    def constrain(role: Role, tree: PyTree) -> PyTree:
        if mesh.device_mesh.size == 1:
            return tree
        axes = {"shared": (), "stacked": replicas}.get(role, order)
        where = placement(mesh, P(axes))
        return jax.tree.map(partial(lax.with_sharding_constraint, shardings=where), tree)

    def virtual(*args: PyTree) -> PyTree:
        args = jax.tree.map(split, in_roles, jax.tree.map(constrain, in_roles, args))
        return jax.tree.map(constrain, out_roles, jax.tree.map(join, out_roles, mapped(*args)))

    return virtual


_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def cached_program(
    fn: Callable[..., Any], key: Hashable, make: Callable[[Callable[..., Any]], Any]
) -> Any:
    """Return `make(fn)` from a cache with keys `fn` and `key`, which does not keep `fn` alive.

    `fn` may close over arrays, so it is referenced weakly: `make` receives a proxy that calls it,
    and the entry is deleted together with `fn`. For a `fn` without weak references, or a key
    without a hash, `make` is called each time.

    Args:
      fn: the function that the program runs.
      key: everything else that the program depends on; must not hold arrays.
      make: makes the program from `fn`.

    Communication: none.
    """
    try:
        programs = _programs.setdefault(fn, {})
        program = programs.get(key)
    except TypeError:
        return make(fn)
    if program is None:
        proxy = weakref.proxy(fn)
        program = programs[key] = make(lambda *args: proxy(*args))
    return program
