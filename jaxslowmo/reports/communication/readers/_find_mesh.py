"""The meshes a program runs on, as far as needed to name the axes of its collectives."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


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
    """The facts of a `jax.sharding.Mesh` or `AbstractMesh`.

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
    """Meshes of all `shard_map` equations of a jaxpr, outermost first, without duplicates."""
    found: dict[MeshAxes, None] = {}
    for eqn in _equations(jaxpr):
        if "mesh" in eqn.params and hasattr(eqn.params["mesh"], "axis_names"):
            found[mesh_axes(eqn.params["mesh"])] = None
    return list(found)


def _equations(jaxpr: Any) -> Iterator[Any]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # a closed jaxpr holds an open one
    for eqn in getattr(jaxpr, "eqns", ()):
        yield eqn
        # Sub-programs are parameters, alone (jit, scan) or in a tuple (the branches of a cond).
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                    yield from _equations(item)


def meshes_of_arguments(args: Any) -> list[MeshAxes]:
    """Meshes of the `NamedSharding`s of arrays and ShapeDtypeStructs in a pytree."""
    return _meshes_of(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))


def meshes_of_compiled(compiled: jax.stages.Compiled) -> list[MeshAxes]:
    """Meshes of the arguments and results of a compiled program, as far as they have one."""
    return _meshes_of(jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)))


def _meshes_of(shardings: Iterable[Any]) -> list[MeshAxes]:
    named = (s for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    return list(dict.fromkeys(mesh_axes(sharding.mesh) for sharding in named))
