"""Compile for TPU slices on a CPU (libtpu compiles, nothing runs)."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js


def tpu_mesh(topology: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh over the chips of a TPU slice such as "v5e:2x4"."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def on(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Shapes of `tree`, placed on `mesh`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
    )


def report_of_step(step_on: Any, params: Any, batch: Any, mesh: Mesh) -> js.CommReport:
    """`comm_report` of a step compiled for `mesh`; `step_on(mesh)` makes the step.

    `params` and `batch` are shapes; the state's shapes come from tracing the step's set-up on
    virtual replicas.
    """
    virtual = js.virtual_mesh(dict(mesh.shape))
    state = jax.eval_shape(lambda p: step_on(virtual).init(p), params)
    inner = tuple(mesh.axis_names)
    return js.comm_report(step_on(mesh), on(state, mesh, P("replica")), on(batch, mesh, P(inner)))
