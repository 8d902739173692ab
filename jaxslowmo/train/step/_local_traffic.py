"""What the compiler sends between replicas in a local step, with `map_with="vmap"`."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from ..._support.checks import warn_user
from ..._support.types import AxisName, axis_names
from ...mesh import AnyMesh
from ...reports import comm_report_of


class LocalTraffic:
    """The traffic of the first local program of a step, of which it warns.

    Args:
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
    """

    def __init__(self, mesh: AnyMesh, axis_name: AxisName) -> None:
        self._mesh, self._replicas = mesh, {*axis_names(axis_name)}
        # Replicas of one device are in a `shard_map`, where nothing is sent but what says so.
        inside = {name for name, size in mesh.shape.items() if size > 1} - self._replicas
        self._is_read = not isinstance(mesh, Mesh) or not inside

    def read(self, program: Any, *args: Any) -> None:
        """Warn, once, if a local step of this program sends between replicas.

        The program is compiled, as its call would compile it. Without a phase it may decide itself
        what is due; then what it sends outside of its conditionals counts.

        Args:
          program: a jitted program.
          *args: its arguments.
        """
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        if self._is_read or is_traced:
            return
        assert isinstance(self._mesh, Mesh), "virtual replicas send nothing"
        self._is_read = True
        report = comm_report_of(program.lower(*args).compile(), mesh=self._mesh)
        kind = "local" if "local" in report.kinds else report.kinds[0]
        rows = [x for x in report.rows if x.kind == kind]
        if wrong := [x for x in rows if self._replicas & {*x.axis.split(",")}]:
            listed = ", ".join(f"{x.collective} of {x.bytes} bytes over {x.axis}" for x in wrong)
            warn_user(
                f'`map_with`="vmap": a local step sends between replicas: {listed}. The compiler '
                "does so for some operations on sharded arrays, such as `take_along_axis` of "
                "labels: gather what they read by a sharding constraint before, put them into a "
                'jax.shard_map, or use map_with="shard_map".'
            )
