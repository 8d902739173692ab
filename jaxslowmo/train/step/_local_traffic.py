"""What the compiler sends between replicas in a local step that is mapped by `jax.vmap`."""

from typing import Any

import jax
from jax.core import Tracer

from ..._support.checks import warn_user
from ..._support.types import AxisName, Phase, axis_names
from ...mesh import AnyMesh, MapWith, device_mesh, has_device_per_position
from ...reports import comm_report_of
from ...transform import ParameterTransform


def has_local_steps(gradients: Any, sync: ParameterTransform | None) -> bool:
    """Return whether a step with these exchanges has updates in which nothing is to be sent."""
    if gradients is not None or sync is None:
        return False
    return bool(sync.algorithm.needs) or () in sync.phases()  # what is not known yet is rare


class LocalTraffic:
    """The traffic of the first local program of a step, of which it warns.

    Args:
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      map_with: how the local step is mapped.
      has_local_steps: whether there are updates in which no part of a step sends anything.

    Attributes:
      may_send: whether the compiler may send something nevertheless.
    """

    def __init__(
        self, mesh: AnyMesh, axis_name: AxisName, map_with: MapWith, *, has_local_steps: bool
    ) -> None:
        self._mesh, self._replicas = device_mesh(mesh), {*axis_names(axis_name)}
        # Replicas of one device are in a `shard_map`, where nothing is sent but what says so;
        # several on each of several devices are under `vmap`.
        split = {name for name, size in self._mesh.shape.items() if size > 1}
        is_vmapped = bool(split - self._replicas) and map_with == "vmap"
        self._flag = 0
        if not has_device_per_position(mesh):
            # Programs of several replicas on a device agree by a flag on what is due.
            is_vmapped, self._flag = bool(split), 4
        self.may_send = has_local_steps and is_vmapped
        self._is_read = not self.may_send

    def before_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Warn, once, if a local step of this program sends between replicas.

        The program is compiled, as its call would compile it. Without a phase it may decide itself
        what is due; then what it sends outside of its conditionals counts.

        Args:
          program: a jitted program.
          name: name of what the program does.
          phase: the phase of its updates; None if it decides itself, or has none.
          *args: its arguments.
        """
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        is_local = name == "update" and not phase
        if self._is_read or not is_local or is_traced:
            return
        self._is_read = True
        report = comm_report_of(program.lower(*args).compile(), mesh=self._mesh)
        kind = "local" if "local" in report.kinds else report.kinds[0]
        rows = [x for x in report.rows if x.kind == kind]
        rows = [x for x in rows if self._replicas & {*x.axis.split(",")} and x.bytes > self._flag]
        if rows:
            listed = ", ".join(f"{x.collective} of {x.bytes} bytes over {x.axis}" for x in rows)
            warn_user(
                f"A local step sends between replicas: {listed}. The compiler does so for some "
                'operations on sharded arrays under `map_with`="vmap", or with several replicas on '
                "each device, such as `take_along_axis` of labels: gather what they read by a "
                "sharding constraint before, put them into a jax.shard_map, or use "
                'map_with="shard_map" and a device for each replica.'
            )
