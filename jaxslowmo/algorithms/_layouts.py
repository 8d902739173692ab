"""A parameter transform for parameters that are sharded inside a replica, and who made a state."""

import jax

from .._typing import AxisName, PyTree
from ..mesh import AnyMesh, inner_specs, map_replicas, model_axes
from ._checks import form_of
from ._protocol import ParameterTransform


def made_by(
    state: PyTree,
    sync: ParameterTransform,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
) -> ParameterTransform:
    """`sync.with_specs` of these parameters, or else `sync`: whose `init` makes what `state` is.

    Args:
      state: stacked, of one of the two.
      sync: the transform as it was given.
      stacked_params: leaves `(replicas, *s)` as they lie on `mesh`.
      mesh: where the replicas are.
      axis_name: the replica axis.

    Raises:
      ValueError: of neither.

    Communication: none; nothing runs.
    """
    specs = inner_specs(stacked_params, mesh, axis_name, stacked=True)
    if specs is None:
        return sync
    automatic = model_axes(stacked_params, mesh, axis_name)
    known = sync.with_specs(specs)
    for tx in (known, sync) if known is not sync else (sync,):
        init = map_replicas(
            tx.init, mesh=mesh, axis_name=axis_name, in_roles=("stacked",), automatic=automatic
        )
        if form_of(jax.eval_shape(init, stacked_params)) == form_of(state):
            return tx
    raise ValueError(
        "`state` must be made by `sync` for these parameters on this mesh, and it has another "
        "structure or other shapes: was it made by another transform, or with other arguments?"
    )
