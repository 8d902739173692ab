"""Find the axes over which programs communicate, and between whose positions results differ."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

from .._support.scopes import OF_TRANSFORMS
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, model_axes
from ._programs import Loop, called_program, interpret, loss_arguments, programs_in

_NOT_SENDING = {"axis_index", "pvary"}  # name an axis, and send nothing


def collective_axes(
    program: Any, counts: Callable[[Any], bool] = lambda equation: True
) -> frozenset[str]:
    """Return the names of the axes of all collectives in a program, nested programs included.

    Args:
      program: a jaxpr, closed or open.
      counts: decides for an equation whether its collectives, and those inside it, count; all by
        default.

    Communication: none.
    """
    axes: set[str] = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        inside = (collective_axes(part, counts) for part in programs_in(equation))
        named = set[str]().union(*inside)
        if equation.primitive.name == "shard_map":  # it binds axes of its own
            named -= equation.params["newly_manual_axes"]
        if equation.primitive.name not in _NOT_SENDING:
            named |= _named_axes(equation)
        if named and counts(equation):
            axes |= named
    return frozenset(axes)


def _named_axes(equation: Any) -> set[str]:
    """Return the mapped axes that an equation names; those of arrays are positions, ints."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = axes if isinstance(axes, list | tuple) else [axes]
    return {name for name in names if isinstance(name, str)}


def varying_axes(program: Any, inputs: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Return for each output of a program the mapped axes between whose positions it may differ.

    Args:
      program: a jaxpr, closed or open.
      inputs: the axes between whose positions each input differs.

    Communication: none.
    """
    return interpret(program, inputs, _varying_axes_of_equation, lambda _: frozenset[str]())


# Collectives whose results are equal on all positions, and those whose results differ.
_EQUAL = {"psum", "pmax", "pmin", "all_gather"}
_DIFFERENT = {"ppermute", "all_to_all", "reduce_scatter", "axis_index"}


def _varying_axes_of_equation(eqn: Any, operands: list[frozenset[str]]) -> list[frozenset[str]]:
    params, name = eqn.params, eqn.primitive.name.removesuffix("_invariant")
    together = frozenset[str]().union(*operands)
    axes = _named_axes(eqn)
    if name in _EQUAL:
        is_grouped = params.get("axis_index_groups") is not None
        return [each | axes if is_grouped else each - axes for each in operands]
    if name in _DIFFERENT:
        return [together | axes] * len(eqn.outvars)
    if name == "cond":
        index, *rest = operands
        each = [varying_axes(branch, rest) for branch in params["branches"]]
        return [index.union(*results) for results in zip(*each, strict=True)]
    if name in ("scan", "while"):
        return Loop.from_equation(eqn).fixed_point(varying_axes, operands, frozenset.union)[0]
    if inner := called_program(eqn):
        return varying_axes(inner, operands)
    return [together] * len(eqn.outvars)


class UpdateFacts(NamedTuple):
    """The facts that are read from the program of a transform's update.

    Attributes:
      undeclared: the axes of the collectives that no transform of jaxslowmo has made.
      updates: a tree like the updates, of the axes between whose positions a leaf may differ.
      state: the same of the state.
    """

    undeclared: frozenset[str]
    updates: PyTree
    state: PyTree


def read_update(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    *,
    mesh: AnyMesh,
    axes: Collection[str],
    varying: PyTree,
    extra: bool,
) -> UpdateFacts | None:
    """Trace an update with shapes alone, and return what its program says.

    Args:
      tx: any transform.
      params: stacked parameters, or their shapes.
      state: the stacked state of `tx`, or its shapes.
      mesh: the mesh.
      axes: its axes that are mapped, over which an update may communicate; others are automatic.
      varying: a tree like the gradients, of the axes between whose positions a leaf differs;
        parameters and state do not differ there.
      extra: whether the update takes extra arguments.

    Returns:
      The facts; None where the update itself raises. It may lack what only a step has, and if not,
      the first step raises the error, and says more of it.

    Communication: none.
    """

    def update(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree] | None:
        arguments = loss_arguments(grads, jnp.float32(1.0)) if extra else {}
        try:
            return tx.update(grads, state, params, **arguments)
        except Exception:  # of the transform's own code alone, so that nothing else goes unseen
            return None

    program, results = _trace_replica(update, mesh, axes, params, params, state)
    if results is None:
        return None
    inputs = varying, jax.tree.map(lambda _: frozenset[str](), (params, state))
    over = varying_axes(program, jax.tree.leaves(inputs))
    updates, after = jax.tree.unflatten(jax.tree.structure(results), over)
    return UpdateFacts(collective_axes(program, _is_outside_transforms), updates, after)


def state_types(
    tx: optax.GradientTransformation, params: PyTree, *, mesh: AnyMesh, axis_name: AxisName
) -> PyTree:
    """Return the types of one replica's state, as `js.init` makes it; `params` are stacked.

    Raises:
      Exception: what `init` raises.

    Communication: none.
    """
    axes = {*mesh.axis_names} - model_axes(params, mesh, axis_name)
    return _trace_replica(tx.init, mesh, axes, params)[1]


def _trace_replica(
    fn: Callable[..., PyTree], mesh: AnyMesh, axes: Collection[str], *args: PyTree
) -> tuple[Any, PyTree]:
    """Return the program of `fn`, and the types of its results, as in a replica of a step.

    `args` are stacked.
    """
    kinds = (AxisType.Manual if name in axes else AxisType.Auto for name in mesh.axis_names)
    inside = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, tuple(kinds))
    bound = [(name, mesh.shape[name]) for name in axes]
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
    with jax.sharding.use_abstract_mesh(inside):
        return jax.make_jaxpr(fn, axis_env=bound, return_shape=True)(*one)


def _is_outside_transforms(equation: Any) -> bool:
    return not any(name in str(equation.source_info.name_stack) for name in OF_TRANSFORMS)
