"""Over which axes a function sends something of which the package knows nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

from .._support.scopes import (
    ALL_REDUCE_GRADIENTS,
    ALL_REDUCE_ROWS,
    CLIP,
    GRADIENT_TRANSFORM,
    LOSS_SCALE,
    PHASE,
    SKIP_UNUSED,
    TIED,
)
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, map_replicas
from ._jaxprs import collective_axes

_KNOWN = (
    ALL_REDUCE_GRADIENTS,
    ALL_REDUCE_ROWS,
    CLIP,
    GRADIENT_TRANSFORM,
    LOSS_SCALE,
    PHASE,
    SKIP_UNUSED,
    TIED,
)


def unnamed_exchanges(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
) -> frozenset[str]:
    """Axes of the collectives in an update of `tx` that no transform of ours has made.

    The update is traced, for shapes alone. What cannot be traced like this says nothing: what is
    wrong with it the first step tells.

    Args:
      tx: any transform.
      params: stacked parameters, or shapes of them.
      state: of `tx`, stacked likewise.
      mesh: whose axes are bound while it is traced.
      axis_name: the replica axis.

    Communication: none.
    """
    found: set[str] = set()

    def per_replica(params: PyTree, state: PyTree) -> PyTree:
        update = jax.jit(lambda *operands: _updated(tx, *operands))
        program = update.trace(params, state).jaxpr
        found.update(collective_axes(program.jaxpr, _is_unnamed))
        return ()

    names = mesh.axis_names
    bound = AbstractMesh(tuple(mesh.shape.values()), names, (AxisType.Auto,) * len(names))
    # Types of what varies would only be in the way: they refuse what the step knows how to run.
    mapped = map_replicas(
        per_replica,
        mesh=bound,
        axis_name=axis_name,
        in_roles=("stacked", "stacked"),
        check_vma=False,
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    try:
        jax.eval_shape(mapped, *shapes)
    except Exception:  # it may want arguments that a trial has not: the first step then tells
        return frozenset()
    return frozenset(found)


def _updated(tx: optax.GradientTransformationExtraArgs, params: PyTree, state: PyTree) -> PyTree:
    told: dict[str, Any] = {
        "value": jnp.float32(1.0),
        "grad": params,
        "value_fn": lambda p: optax.tree.norm(p, squared=True),
    }
    try:
        return tx.update(params, state, params, **told)
    except TypeError:  # takes no more than it knows
        return tx.update(params, state, params)


def _is_unnamed(equation: Any) -> bool:
    scopes = str(equation.source_info.name_stack)
    return not any(name in scopes for name in _KNOWN)
