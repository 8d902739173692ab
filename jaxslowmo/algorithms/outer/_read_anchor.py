"""The anchor of an outer optimizer, read from its state on the devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..._support.types import AxisName, PyTree
from ...mesh import AnyMesh, cached_program, inner_specs, map_replicas, model_axes
from ...transform import ParameterTransform


def read_anchor(
    sync: ParameterTransform,
    state: PyTree,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """Return the anchor of `slowmo`, `diloco` or `noloco`: what the last outer step reached.

    Args:
      sync: the transform that made the state.
      state: its stacked state; in a `TrainState`, `state.exchange`.
      stacked_params: the parameters, leaves `(replicas, *s)`; only shapes and dtypes matter.
      mesh: the mesh on which the parameters are placed.
      axis_name: the replica axis.

    Returns:
      A tree of `(replicas, *s)`, like the parameters, in float32 (float64 for float64 leaves). It
      is equal on all replicas, unless each has its own: with `exact_average=False`, or `noloco`.

    Raises:
      ValueError: a transform without an anchor.

    Communication: one all-gather of a sharded anchor over `axis_name`; none for a whole anchor.
    """
    if not sync.algorithm.has_anchor:
        raise ValueError(
            "`sync` must be made by js.slowmo, js.diloco or js.noloco: others have no anchor."
        )
    if "anchor" in state.shared:
        anchor, first = (jax.tree.leaves(x)[0] for x in (state.shared["anchor"], stacked_params))
        if anchor.ndim < first.ndim:  # a step has it whole
            return jax.jit(_broadcast)(state.shared["anchor"], stacked_params)
    # This needs a program, since this host does not hold the blocks of other processes.
    automatic = model_axes(stacked_params, mesh, axis_name)

    def compile_program(anchor_of: Callable[..., PyTree]) -> Callable[[PyTree, PyTree], PyTree]:
        return jax.jit(
            map_replicas(
                anchor_of,
                mesh=mesh,
                axis_name=axis_name,
                in_roles=("stacked", "stacked"),
                automatic=automatic,
            )
        )

    specs = inner_specs(stacked_params, automatic) if automatic else None
    over = (mesh, axis_name, automatic)
    anchor_of = sync.with_specs(specs).anchor
    return cached_program(anchor_of, over, compile_program)(state, stacked_params)


def _broadcast(anchor: PyTree, stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda a, x: jnp.broadcast_to(a, x.shape), anchor, stacked)
