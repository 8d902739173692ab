"""The anchor as a tree, read from a train state."""

from collections.abc import Callable

import jax

from ..._support.types import AxisName, PyTree
from ...mesh import AnyMesh, kept_with, map_replicas, model_axes
from ...transform import ParameterTransform


def read_anchor(
    sync: ParameterTransform,
    state: PyTree,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """The anchor of `slowmo` or `diloco` as a float32 tree like the parameters.

    Args:
      sync: the transform that made the state.
      state: its stacked state; in a `TrainState`, `state.opt_state[-1]`.
      stacked_params: the parameters, leaves `(replicas, *s)`; only shapes and dtypes matter.
      mesh: the mesh they live on.
      axis_name: the replica axis.

    Returns:
      Tree of `(replicas, *s)`: equal on all replicas, unless `exact_average=False` lets each keep
      its own.

    Raises:
      ValueError: a transform without an anchor.

    Communication: where the anchor is sharded one all-gather of it over `axis_name`, else none.
    """
    if sync.anchor is None:
        raise ValueError("`sync` must be made by js.slowmo or js.diloco: others have no anchor.")
    # A program, since the shards of other processes are nowhere on this host.
    automatic = model_axes(stacked_params, mesh, axis_name)

    def made(anchor: Callable[[PyTree, PyTree], PyTree]) -> Callable[[PyTree, PyTree], PyTree]:
        return jax.jit(
            map_replicas(
                anchor,
                mesh=mesh,
                axis_name=axis_name,
                in_roles=("stacked", "stacked"),
                automatic=automatic,
            )
        )

    return kept_with(sync.anchor, (mesh, axis_name, automatic), made)(state, stacked_params)
