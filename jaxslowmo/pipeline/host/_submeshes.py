"""The devices of one stage as a mesh of their own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_OWNER = "HostPipeline"


@dataclass(frozen=True)
class SubMesh:
    """The devices of one stage, with the axes of the whole mesh but that of the stages.

    Attributes:
      mesh: its first axis is the replica axis, of size 1 where the whole mesh has none.
      replica_axis: its name.
      data_axes: axes over which a replica's examples are split.
      automatic: axes that are left to the compiler.
    """

    mesh: Mesh
    replica_axis: str
    data_axes: tuple[str, ...]
    automatic: frozenset[str]

    @property
    def replicas(self) -> int:
        """How many replicas train side by side."""
        return self.mesh.shape[self.replica_axis]

    @property
    def shards(self) -> int:
        """Over how many devices a replica's examples are split."""
        return math.prod(self.mesh.shape[name] for name in self.data_axes)

    @property
    def positions(self) -> int:
        """Replicas times shards: what computes apart from each other."""
        return self.replicas * self.shards

    @property
    def split(self) -> NamedSharding:
        """A leading dimension over replicas and data axes."""
        return NamedSharding(self.mesh, P((self.replica_axis, *self.data_axes)))

    @property
    def whole(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, P())


def sub_meshes(
    mesh: Mesh,
    num_stages: int,
    *,
    axis_name: str,
    replica_axis: str,
    data_axes: Sequence[str],
) -> tuple[SubMesh, ...]:
    """One `SubMesh` per device stage.

    Raises:
      ValueError: no real mesh, one without the stage axis or with another size of it, axes that
        are none of the mesh or named twice, devices of other processes.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"{_OWNER}: `mesh` must be a jax.sharding.Mesh, such as js.make_mesh makes: stages "
            f"have devices of their own; got {type(mesh).__name__}."
        )
    has = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
    if mesh.shape.get(axis_name) != num_stages:
        raise ValueError(
            f"{_OWNER}: `mesh` must have an axis {axis_name!r} (`axis_name`) of the size "
            f"{num_stages} of the schedule's stages, got a mesh with {has}."
        )
    data_axes = tuple(data_axes)
    for name in data_axes:
        if name not in mesh.shape or name in (axis_name, replica_axis):
            raise ValueError(
                f"{_OWNER}: `data_axes` must name axes of `mesh` other than {axis_name!r} and "
                f"{replica_axis!r}, got {name!r}; the mesh has {has}."
            )
    if mesh.is_multi_process or any(
        device.process_index != jax.process_index() for device in mesh.devices.flat
    ):
        raise ValueError(
            f"{_OWNER}: `mesh` must lie on the devices of this one process, whose host dispatches "
            "every operation; it has devices of others. js.pipelined runs over several processes."
        )
    stages = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0)
    names = tuple(name for name in mesh.axis_names if name != axis_name)
    if replica_axis in names:
        stages = np.moveaxis(stages, 1 + names.index(replica_axis), 1)
        names = (replica_axis, *(name for name in names if name != replica_axis))
    else:
        stages, names = stages[:, None], (replica_axis, *names)
    automatic = frozenset(names) - {replica_axis, *data_axes}
    types = (AxisType.Auto,) * len(names)
    return tuple(
        SubMesh(Mesh(own, names, axis_types=types), replica_axis, data_axes, automatic)
        for own in stages
    )
