"""Which of two forms of a transform, for one layout inside a replica or another, made a state."""

from collections.abc import Sequence

import jax

from .._typing import AxisName, PyTree
from ..mesh import AnyMesh, map_replicas, model_axes
from ._checks import form_of
from ._protocol import ParameterTransform


def made_by(
    state: PyTree,
    makers: Sequence[ParameterTransform],
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
) -> ParameterTransform:
    """The first of some transforms whose `init` makes what `state` is.

    Args:
      state: stacked, of one of them.
      makers: a transform `with_specs` of these parameters, and as it was given.
      stacked_params: leaves `(replicas, *s)` as they lie on `mesh`.
      mesh: where the replicas are.
      axis_name: the replica axis.

    Raises:
      ValueError: of none.

    Communication: none; nothing runs.
    """
    automatic = model_axes(stacked_params, mesh, axis_name)
    for tx in makers:
        init = map_replicas(
            tx.init, mesh=mesh, axis_name=axis_name, in_roles=("stacked",), automatic=automatic
        )
        if form_of(jax.eval_shape(init, stacked_params)) == form_of(state):
            return tx
    raise ValueError(
        "`state` must be made by `sync` for these parameters on this mesh, and it has another "
        "structure or other shapes: was it made by another transform, or with other arguments?"
    )
