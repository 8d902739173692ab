"""The mesh axes of a program, and the axes that the device groups of a collective run over."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ...tracing import equations_in
from ._collectives import Groups


@dataclass(frozen=True)
class MeshAxes:
    """Axis names and sizes of a mesh; `ids` are logical device numbers in mesh order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ids: tuple[int, ...]
    # Whether device i belongs to TPU slice i // (devices per slice). Programs for several slices
    # are written for one slice and number only its devices, so their groups can be read only then.
    slice_major: bool = True

    @property
    def size(self) -> int:
        return len(self.ids)


def mesh_axes(mesh: Any) -> MeshAxes:
    """Return the axes of a `jax.sharding.Mesh` or `AbstractMesh`.

    Programs number devices by their place in the device assignment, which is the mesh order.
    """
    sizes = tuple(int(size) for size in mesh.shape.values())
    total = int(np.prod(sizes, dtype=int))
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    return MeshAxes(
        tuple(str(name) for name in mesh.axis_names),
        sizes,
        tuple(range(total)),
        slices == sorted(slices),
    )


def meshes_of_jaxpr(jaxpr: Any) -> list[MeshAxes]:
    """Return the meshes of all `shard_map` equations of a jaxpr, each once, outermost first."""
    params = (equation.params for equation in equations_in(jaxpr))
    meshes = (p["mesh"] for p in params if hasattr(p.get("mesh"), "axis_names"))
    return list(dict.fromkeys(map(mesh_axes, meshes)))


def meshes_of_arguments(args: Any) -> list[MeshAxes]:
    """Return the meshes of the `NamedSharding`s of arrays and ShapeDtypeStructs in a pytree."""
    return _meshes_of(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))


def meshes_of_compiled(compiled: jax.stages.Compiled) -> list[MeshAxes]:
    """Return the meshes of those arguments and results of a compiled program that have one."""
    return _meshes_of(jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)))


def _meshes_of(shardings: Iterable[Any]) -> list[MeshAxes]:
    named = (s for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    return list(dict.fromkeys(mesh_axes(sharding.mesh) for sharding in named))


UNKNOWN_AXIS = "?"

_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\]"
    r"(?:,\s*device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?"
    r"\s*\{(?P<used>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _ints(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def parse_groups(text: str) -> Groups:
    """Return the groups (or source-target pairs) in the text of an HLO attribute.

    Args:
      text: `{{0,1},{2,3}}`; `{}` (all devices); the iota form `[2,4]<=[8]` with an optional
        transpose, `[4,2]<=[2,4]T(1,0)`; or the mesh form `mesh['a'=2,'b'=4] {'b'}`, with an
        optional device order `, device_ids=([2,4]T(1,0))` and sub-axes `'b':(2)2`.

    Returns:
      A tuple of groups, () for all devices, None if the text has another form.

    >>> parse_groups("[4,2]<=[2,4]T(1,0)")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    if match := _IOTA.fullmatch(text):
        shape, dims, order = (_ints(part or "") for part in match.groups())
        ids = np.arange(np.prod(dims)).reshape(dims)
        return _rows(ids.transpose(order or None).reshape(shape))
    if match := _MESH.fullmatch(text):
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match["axes"])}
        used = [
            (name, int(before or 1), int(size) if size else sizes[name])
            for name, before, size in _USED_AXIS.findall(match["used"])
        ]
        total = int(np.prod(list(sizes.values())))
        return groups_of_axes(sizes, used, device_order(match["ids"] or "", total))
    if text.startswith("{") and text.endswith("}"):
        inner = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
        return tuple(tuple(_ints(group)) for group in inner)
    return None


def device_order(text: str, total: int) -> tuple[int, ...]:
    """Return the device numbers of a mesh: `[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)` or a plain list."""
    if not text.strip():
        return tuple(range(total))
    dims, _, order = text.rpartition("]")
    if not dims:
        return tuple(_ints(text))
    shape = _ints(dims.rpartition("[")[2])
    ids = np.arange(total).reshape(shape).transpose(_ints(order) or None)
    return tuple(int(i) for i in ids.ravel())


def groups_of_axes(
    sizes: dict[str, int], used: list[tuple[str, int, int]], ids: tuple[int, ...]
) -> Groups:
    """Return the groups of devices that differ only along some axes of a mesh.

    Args:
      sizes: axis name -> size, outermost first.
      used: (axis, before, size) each: the part of the axis that remains after splitting it into
        (before, size, rest); a whole axis is (name, 1, its size).
      ids: device numbers in mesh order.
    """
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, before) -> dimension after the split
    for name, size in sizes.items():
        cuts = {1, size}
        for used_name, before, part in used:
            if used_name == name:
                cuts |= {before, before * part}
        ordered = sorted(cuts)
        for low, high in itertools.pairwise(ordered):
            place[name, low] = len(shape)
            shape.append(high // low)
    # An axis of size 1 has no dimension left after the split: nothing to group.
    wanted = [place[name, before] for name, before, part in used if part > 1]
    rest = [d for d in range(len(shape)) if d not in wanted]
    grid = np.asarray(ids).reshape(shape).transpose(rest + wanted)
    return _rows(grid.reshape(-1, int(np.prod([shape[d] for d in wanted], dtype=int))))


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in table)


@lru_cache(maxsize=256)
def _candidates(mesh: MeshAxes) -> list[tuple[str, int, frozenset[frozenset[int]]]]:
    """Return (name, group size, groups) of every set of axes larger than 1, few axes first."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    large = [name for name in mesh.names if sizes[name] > 1]
    candidates = []
    for count in range(1, len(large) + 1):
        for names in itertools.combinations(large, count):
            groups = groups_of_axes(sizes, [(n, 1, sizes[n]) for n in names], mesh.ids) or ()
            size = int(np.prod([sizes[n] for n in names]))
            candidates.append((",".join(names), size, frozenset(frozenset(g) for g in groups)))
    return candidates


def axis_of(groups: Groups, pairs: bool, meshes: tuple[MeshAxes, ...]) -> tuple[str, int]:
    """Return the mesh axes that a collective runs over, and its group size.

    Args:
      groups: groups of devices, or (source, target) pairs.
      pairs: which of the two.
      meshes: the meshes of the program; the first one that matches names the axis.

    Returns:
      (axis, group size). The axis is a name, names joined by "," or "?" when no set of axes has
      these groups (pairs: when no set of axes connects them). Size 1: nothing moves; 0: unknown.
    """
    if groups is None:
        return UNKNOWN_AXIS, 0
    if pairs:
        moving = [pair for pair in groups if len(set(pair)) > 1]
        if not moving:
            return UNKNOWN_AXIS, 1
        for mesh in meshes:
            for name, size, members in _candidates(mesh):
                group_of = {i: group for group in members for i in group}
                if all(b in group_of.get(a, ()) for a, b in moving):
                    return name, size
        return UNKNOWN_AXIS, len({i for pair in moving for i in pair})
    if not groups:
        groups = (meshes[0].ids,) if meshes else ()
    if not groups:
        return UNKNOWN_AXIS, 0
    size = max(len(group) for group in groups)
    if size == 1:
        return UNKNOWN_AXIS, 1
    wanted = frozenset(frozenset(group) for group in groups)
    for mesh in meshes:
        for name, _, members in _candidates(mesh):
            if members == wanted:
                return name, size
    return UNKNOWN_AXIS, size
