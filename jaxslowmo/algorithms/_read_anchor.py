"""The anchor as a tree, read from a train state."""

from collections.abc import Callable

import jax

from .._typing import AxisName, PyTree
from ..mesh import AnyMesh, inner_specs, kept_with, map_replicas, model_axes
from ._checks import form_of
from ._protocol import ParameterTransform


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
      sync: the transform that made the state, or, for a step made with it, `step.sync`.
      state: its stacked state; in a `TrainState`, `state.opt_state[-1]`.
      stacked_params: the parameters, leaves `(replicas, *s)`; only shapes and dtypes matter.
      mesh: the mesh they live on.
      axis_name: the replica axis.

    Returns:
      Tree of `(replicas, *s)`: equal on all replicas, unless `exact_average=False` lets each keep
      its own.

    Raises:
      ValueError: a transform without an anchor, or one that did not make this state.

    Communication: where the anchor is sharded one all-gather of it over `axis_name`, else none.
    """
    if sync.anchor is None:
        raise ValueError("`sync` must be made by js.slowmo or js.diloco: others have no anchor.")
    automatic = model_axes(stacked_params, mesh, axis_name)

    def lifted(fn: Callable[..., PyTree], num_arguments: int) -> Callable[..., PyTree]:
        return map_replicas(
            fn,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",) * num_arguments,
            automatic=automatic,
        )

    if automatic:  # with another layout than the state's, what is read would be out of order
        known = sync.with_specs(inner_specs(stacked_params, mesh, axis_name, stacked=True))
        makers = (sync, known) if known is not sync else (sync,)
        forms = [form_of(jax.eval_shape(lifted(tx.init, 1), stacked_params)) for tx in makers]
        if form_of(state) not in forms:
            raise ValueError("`state` was not made by `sync` for these parameters on this mesh.")
        sync = makers[forms.index(form_of(state))]
    anchor = sync.anchor
    assert anchor is not None
    key = (mesh, axis_name, automatic)
    return kept_with(anchor, key, lambda fn: jax.jit(lifted(fn, 2)))(state, stacked_params)
