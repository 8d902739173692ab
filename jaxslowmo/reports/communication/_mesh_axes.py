"""The mesh axes of a program, and the axes that the device groups of a collective run over."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np

UNKNOWN_AXIS = "?"

# Groups, or (source, target) pairs, of logical device numbers. () is one group of all devices, and
# None means that the text could not be read.
Groups = tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class MeshAxes:
    """Names and sizes of the axes of a mesh; `ids` are logical device numbers in mesh order."""

    axes: tuple[tuple[str, int], ...]
    ids: tuple[int, ...]
    # Whether device i belongs to TPU slice i // (devices per slice). Programs for several slices
    # are written for one slice and number only its devices, so their groups can be read only then.
    slice_major: bool = field(default=True, compare=False)


def mesh_axes(mesh: Any) -> MeshAxes:
    """Return the axes of a `jax.sharding.Mesh` or `AbstractMesh`.

    Programs number devices by their place in the device assignment, which is the mesh order.
    """
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    axes = tuple((str(name), size) for name, size in mesh.shape.items())
    return MeshAxes(axes, tuple(range(mesh.size)), slices == sorted(slices))


def axes_of_meshes(values: Iterable[Any]) -> list[MeshAxes]:
    """Return the axes of those values that are meshes, or shardings with one."""
    meshes = (getattr(value, "mesh", value) for value in values)
    return [mesh_axes(mesh) for mesh in meshes if hasattr(mesh, "axis_names")]


_DECLARED = re.compile(r"#sdy\.mesh<\[([^\]]+)\](?:, device_ids=\[([^\]]*)\])?>")
_SIZE = re.compile(r"""["']([^"']*)["']=(\d+)""")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?"
    r" \{(?P<used>[^}]*)\}"
)


def declared_meshes(header: str) -> list[MeshAxes]:
    """Return the meshes that the first line of an HLO module declares; only Shardy writes them."""
    return [_mesh(*texts) for texts in _DECLARED.findall(header)]


def _mesh(axes: str, ids: str) -> MeshAxes:
    sizes = tuple((name, int(size)) for name, size in _SIZE.findall(axes))
    return MeshAxes(sizes, device_order(ids, math.prod(size for _, size in sizes)))


def parse_groups(text: str) -> Groups:
    """Return the groups (or source-target pairs) with which a text begins, as HLO has them.

    Args:
      text: `{{0,1},{2,3}}`; `{}` (all devices); the iota form `[2,4]<=[8]` with an optional
        transpose, `[4,2]<=[2,4]T(1,0)`; or the mesh form `mesh['a'=2,'b'=4] {'b'}`, with an
        optional device order `, device_ids=([2,4]T(1,0))` and sub-axes `'b':(2)2`.

    Returns:
      A tuple of groups, () for all devices, None if the text has another form.

    >>> parse_groups("[4,2]<=[2,4]T(1,0)")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    if match := _IOTA.match(text):
        return _rows(np.reshape(device_order(match[0], 0), _ints(match[1])))
    if match := _OF_MESH.match(text):
        mesh = _mesh(match["axes"], match["ids"] or "")
        sizes, used = dict(mesh.axes), _USED.findall(match["used"])
        return groups_of_axes(mesh, [(x, int(b or 1), int(n or sizes[x])) for x, b, n in used])
    if match := _LISTED.match(text):
        return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", match[1]))
    return None


def device_order(text: str, total: int) -> tuple[int, ...]:
    """Return the device numbers of a mesh: `[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)` or a plain list.

    Without a text they are those from 0 to `total`.
    """
    if match := _IOTA.fullmatch(text):
        dims = _ints(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(_ints(match[3] or "") or None)
        return tuple(ids.ravel().tolist())
    return tuple(_ints(text) or range(total))


def _ints(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def groups_of_axes(mesh: MeshAxes, used: list[tuple[str, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that differ only along some axes of a mesh.

    Args:
      mesh: the mesh.
      used: (axis, before, size) each: the part of the axis that remains after splitting it into
        (before, size, rest); a whole axis is (name, 1, its size).
    """
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, before) -> dimension after the split
    for name, size in mesh.axes:
        cuts = {1, size}.union(*({b, b * part} for axis, b, part in used if axis == name))
        for low, high in itertools.pairwise(sorted(cuts)):
            place[name, low] = len(shape)
            shape.append(high // low)
    # An axis of size 1 has no dimension left after the split: nothing to group.
    wanted = [place[name, before] for name, before, part in used if part > 1]
    rest = [d for d in range(len(shape)) if d not in wanted]
    grid = np.reshape(mesh.ids, shape).transpose(rest + wanted)
    return _rows(grid.reshape(-1, math.prod(shape[d] for d in wanted)))


def _rows(table: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, table.tolist()))


@lru_cache(maxsize=256)
def _candidates(mesh: MeshAxes) -> list[tuple[str, int, frozenset[frozenset[int]]]]:
    """Return (name, group size, groups) of every set of axes larger than 1, few axes first."""
    large = [(name, 1, size) for name, size in mesh.axes if size > 1]
    sets = (s for count in range(len(large)) for s in itertools.combinations(large, count + 1))
    candidates = []
    for used in sets:
        groups, names = groups_of_axes(mesh, [*used]), ",".join(name for name, *_ in used)
        candidates.append((names, len(groups[0]), frozenset(map(frozenset, groups))))
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
    if groups == () and not pairs:
        groups = (meshes[0].ids,) if meshes else None
    if groups is None:
        return UNKNOWN_AXIS, 0
    moving = [group for group in groups if len(set(group)) > 1]
    if not moving:
        return UNKNOWN_AXIS, 1
    wanted = frozenset(map(frozenset, groups))
    for mesh in meshes:
        for name, size, members in _candidates(mesh):
            group_of = {i: group for group in members for i in group}
            if all(b in group_of.get(a, ()) for a, b in moving) if pairs else members == wanted:
                return name, size
    return UNKNOWN_AXIS, len({*itertools.chain(*moving)}) if pairs else max(map(len, moving))
