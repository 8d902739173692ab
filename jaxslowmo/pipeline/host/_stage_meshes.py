"""A mesh for the devices of each stage, and views of arrays on them without a copy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._plan import Plan


@dataclass(frozen=True)
class BatchAxes:
    """The axes of a mesh over which the devices of a stage compute independently.

    Attributes:
      replicas: the axes of the replicas; () for one copy of the parameters, without a leading
        dimension.
      inner: axes inside a replica between whose devices the caller has split the batch.
      data_axes: axes inside a replica over which this pipeline splits each microbatch.
    """

    replicas: tuple[str, ...]
    inner: tuple[str, ...]
    data_axes: tuple[str, ...]

    @property
    def lead(self) -> tuple[str, ...]:
        """The axes of the leading dimension of a batch; () if there is one copy of it."""
        return (*self.replicas, *self.inner)

    @property
    def all(self) -> tuple[str, ...]:
        """All axes over which devices compute independently."""
        return (*self.lead, *self.data_axes)


class StageMeshes:
    """The meshes of all stages: each has the axes of the whole mesh, that of the stages of size 1.

    Args:
      plan: the pipeline.

    Raises:
      ValueError: devices of several processes.
    """

    def __init__(self, plan: Plan) -> None:
        mesh, self._axis_name = plan.mesh, plan.axis_name
        process = jax.process_index()
        if mesh.is_multi_process or any(d.process_index != process for d in mesh.devices.flat):
            raise ValueError(
                '`executor`="host" dispatches every operation from one process, and `mesh` has '
                'devices of others: use `executor`="one_program", which runs over several.'
            )
        # Axes inside of a stage are left to the compiler, whatever their types in the whole mesh.
        types = (AxisType.Auto,) * len(mesh.axis_names)
        self.whole = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        dim = mesh.axis_names.index(plan.axis_name)
        self.meshes = [
            Mesh(devices, mesh.axis_names, axis_types=types)
            for devices in np.split(mesh.devices, mesh.devices.shape[dim], axis=dim)
        ]

    def views(
        self, x: jax.Array | np.ndarray, spec: P, memory: str | None = None
    ) -> list[jax.Array]:
        """Return each stage's part of an array; the parts share the array's buffers.

        Args:
          x: an array; it is copied only if it is not yet placed as `spec` and `memory` require.
          spec: its sharding over the whole mesh.
          memory: its kind of memory; None: the memory of the devices.
        """
        placed: Any = jax.device_put(x, NamedSharding(self.whole, spec, memory_kind=memory))
        parts = {shard.device: shard.data for shard in placed.addressable_shards}
        names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        shape = [
            1 if self._axis_name in axes else size
            for size, axes in zip(placed.shape, [*names, *[()] * placed.ndim], strict=False)
        ]
        return [
            jax.make_array_from_single_device_arrays(
                tuple(shape),
                NamedSharding(mesh, spec, memory_kind=memory),
                [parts[device] for device in mesh.devices.flat],
            )
            for mesh in self.meshes
        ]

    def views_by_name(
        self, arrays: Mapping[str, Any], spec_of: Callable[[str], P]
    ) -> list[dict[str, jax.Array]]:
        """Return each stage's parts of arrays, by name; `spec_of(name)` is an array's sharding."""
        views = {name: self.views(x, spec_of(name)) for name, x in arrays.items()}
        return [{n: parts[i] for n, parts in views.items()} for i in range(len(self.meshes))]

    def join_stages(self, parts: Sequence[jax.Array], spec: P) -> jax.Array:
        """Return the array on the whole mesh with this sharding, from the parts on the stages."""
        dim = next(i for i, entry in enumerate(spec) if entry == self._axis_name)
        shape = list(parts[0].shape)
        shape[dim] = len(parts)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            tuple(shape), NamedSharding(self.whole, spec), shards
        )
