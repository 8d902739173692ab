"""The devices of each stage as a mesh of their own, and arrays on them without a copy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..plan import Plan


@dataclass(frozen=True)
class Spread:
    """Over which axes of a mesh the devices of a stage compute apart from each other.

    Attributes:
      replicas: the axes of the replicas; () where there is one copy of the parameters, without a
        leading dimension.
      inner: axes inside a replica between whose devices the caller has split the batch.
      data_axes: axes inside a replica over which this pipeline splits each microbatch.
    """

    replicas: tuple[str, ...]
    inner: tuple[str, ...]
    data_axes: tuple[str, ...]

    @property
    def lead(self) -> tuple[str, ...]:
        """The axes of the leading dimension of a batch; () where there is one copy."""
        return (*self.replicas, *self.inner)

    @property
    def all(self) -> tuple[str, ...]:
        """The axes at whose positions devices compute apart."""
        return (*self.lead, *self.data_axes)


class StageMeshes:
    """The devices of all stages: one mesh for each, of the axes of the whole, "stage" of size 1.

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
        # What lies inside of a stage is left to the compiler there, whatever the whole mesh says.
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
        """Return for each stage its part of an array, whose buffers they share.

        Args:
          x: an array anywhere; one that lies as it should is not copied.
          spec: how it lies over the whole mesh.
          memory: the kind of memory that it lies in; None: that of the devices.
        """
        placed: Any = jax.device_put(x, NamedSharding(self.whole, spec, memory_kind=memory))
        parts = {shard.device: shard.data for shard in placed.addressable_shards}
        names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        shape = [
            1 if self._axis_name in own else size
            for size, own in zip(placed.shape, [*names, *[()] * placed.ndim], strict=False)
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
        """Return for each stage its parts of arrays, each of which lies as `spec_of` its name."""
        views = {name: self.views(x, spec_of(name)) for name, x in arrays.items()}
        return [{n: own[i] for n, own in views.items()} for i in range(len(self.meshes))]

    def joined(self, parts: Sequence[jax.Array], spec: P) -> jax.Array:
        """Return the array on the whole mesh whose parts lie on the stages, as `spec` says."""
        dim = next(i for i, entry in enumerate(spec) if entry == self._axis_name)
        shape = list(parts[0].shape)
        shape[dim] = len(parts)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            tuple(shape), NamedSharding(self.whole, spec), shards
        )
