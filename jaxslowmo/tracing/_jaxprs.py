"""Find the axes over which programs communicate, and between whose positions results differ."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

from .._support.scopes import OF_TRANSFORMS
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, map_replicas
from ._programs import Loop, called_program, interpret, loss_arguments, programs_in

_Fact = TypeVar("_Fact")

_NOT_SENDING = {"axis_index", "pvary"}  # name an axis, and send nothing


def collective_axes(program: Any, counts: Callable[[Any], bool] | None = None) -> frozenset[str]:
    """Return the names of the axes of all collectives in a program, nested programs included.

    Args:
      program: a jaxpr, closed or open.
      counts: decides for an equation whether its collectives, and those inside it, count; None
        counts all.

    Communication: none.
    """
    axes: set[str] = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        inside = (collective_axes(part, counts) for part in programs_in(equation))
        # A nested shard_map binds axes of its own.
        named = set[str]().union(*inside) - set(equation.params.get("manual_axes", ()))
        if equation.primitive.name not in _NOT_SENDING:
            named |= _named_axes(equation)
        if named and (counts is None or counts(equation)):
            axes |= named
    return frozenset(axes)


def _named_axes(equation: Any) -> set[str]:
    """Return the mapped axes that an equation names; those of arrays are positions, ints."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = axes if isinstance(axes, list | tuple) else [axes]
    return {name for name in names if isinstance(name, str)}


def differing_axes(program: Any, inputs: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Return for each output of a program the mapped axes between whose positions it may differ.

    Args:
      program: a jaxpr, closed or open.
      inputs: the axes between whose positions each input differs.

    Communication: none.
    """
    return interpret(program, inputs, _differing, lambda _: frozenset[str]())


# Collectives whose results are equal on all positions, and those whose results differ.
_EQUAL = {"psum", "pmax", "pmin", "all_gather"}
_DIFFERENT = {"ppermute", "all_to_all", "reduce_scatter", "axis_index"}


def _differing(eqn: Any, operands: list[frozenset[str]]) -> list[frozenset[str]]:
    params, name = eqn.params, eqn.primitive.name.removesuffix("_invariant")
    together = frozenset[str]().union(*operands)
    axes = _named_axes(eqn)
    if name in _EQUAL:
        if params.get("axis_index_groups") is not None:
            return [each | axes for each in operands]
        return [each - axes for each in operands]
    if name in _DIFFERENT:
        return [together | axes] * len(eqn.outvars)
    if name == "cond":
        index, *rest = operands
        each = [differing_axes(branch, rest) for branch in params["branches"]]
        return [index.union(*results) for results in zip(*each, strict=True)]
    if name in ("scan", "while"):
        return Loop.of(eqn).settled(differing_axes, operands, frozenset.union)[0]
    if inner := called_program(eqn):
        return differing_axes(inner, operands)
    return [together] * len(eqn.outvars)


class UpdateFacts(NamedTuple):
    """The facts that are read from the program of a transform's update.

    Attributes:
      unnamed: the axes of the collectives that no transform of jaxslowmo has made.
      updates: a tree like the updates, of the axes between whose positions a leaf may differ.
      state: the same of the state.
    """

    unnamed: frozenset[str]
    updates: PyTree
    state: PyTree


def read_update(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    differing: PyTree,
) -> UpdateFacts | None:
    """Trace an update with shapes alone, and return what its program says.

    Args:
      tx: any transform.
      params: stacked parameters, or their shapes.
      state: the stacked state of `tx`, or its shapes.
      mesh: the mesh whose axes are bound while the update is traced.
      axis_name: the replica axis.
      differing: a tree like the gradients, of the axes between whose positions a leaf differs;
        parameters and state do not differ there.

    Returns:
      The facts; None where the update cannot be traced so, perhaps because it needs arguments that
      only a step has: the first step then raises the error.

    Communication: none.
    """

    def facts(params: PyTree, state: PyTree) -> UpdateFacts:
        program = jax.jit(partial(_updated, tx)).trace(params, params, state)
        inputs = differing, jax.tree.map(lambda _: frozenset[str](), (params, state))
        axes = differing_axes(program.jaxpr, jax.tree.leaves(inputs))
        updates, after = jax.tree.unflatten(jax.tree.structure(program.out_info), axes)
        return UpdateFacts(collective_axes(program.jaxpr, _is_unnamed), updates, after)

    return _traced(facts, (params, state), mesh, axis_name)


def state_types(
    tx: optax.GradientTransformation, params: PyTree, *, mesh: AnyMesh, axis_name: AxisName
) -> PyTree | None:
    """Return the types of one replica's state; None where `init` needs more than parameters.

    `params` are stacked.

    Communication: none.
    """
    return _traced(partial(jax.eval_shape, tx.init), (params,), mesh, axis_name)


def _traced(
    fact: Callable[..., _Fact], args: tuple[PyTree, ...], mesh: AnyMesh, axis_name: AxisName
) -> _Fact | None:
    """Return `fact(*args)` with types of one replica and the mesh's axes bound; None if it raises.

    A transform may lack arguments that only a step has, and then the first step raises the error.
    """
    facts: list[_Fact] = []

    def per_replica(*args: PyTree) -> PyTree:
        facts.append(fact(*args))
        return ()

    names = mesh.axis_names
    bound = AbstractMesh(tuple(mesh.shape.values()), names, (AxisType.Auto,) * len(names))
    roles: Any = ("stacked",) * len(args)
    mapped = map_replicas(per_replica, mesh=bound, axis_name=axis_name, in_roles=roles)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with contextlib.suppress(Exception):
        jax.eval_shape(mapped, *shapes)
    return facts[0] if facts else None


def _updated(
    tx: optax.GradientTransformationExtraArgs, grads: PyTree, params: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    try:
        return tx.update(grads, state, params, **loss_arguments(grads, jnp.float32(1.0)))
    except TypeError:  # the transform accepts no extra arguments
        return tx.update(grads, state, params)


def _is_unnamed(equation: Any) -> bool:
    scopes = str(equation.source_info.name_stack)
    return not any(name in scopes for name in OF_TRANSFORMS)
