"""Find the axes that programs communicate over, and run programs whose types jax refuses."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from .._support.scopes import OF_TRANSFORMS
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, map_replicas, vary_over, varying_axes
from ._programs import called_program, interpret, programs_in, scan_operands, scan_options

# The axes of a program that was read before: a conditional inside others is read once per level.
_known: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_NOT_SENDING = {"axis_index", "pvary", "pcast"}  # name an axis, and send nothing


def collective_axes(program: Any, counts: Callable[[Any], bool] | None = None) -> frozenset[str]:
    """Return the names of the axes of all collectives in a program, nested programs included.

    Args:
      program: a jaxpr, closed or open.
      counts: decides for an equation whether its collectives, and those inside it, count; None
        counts all.

    Communication: none.
    """
    jaxpr = getattr(program, "jaxpr", program)
    if counts is None and jaxpr in _known:
        return _known[jaxpr]
    axes: set[str] = set()
    for equation in jaxpr.eqns:
        equation_axes: set[str] = set()
        for part in programs_in(equation):
            equation_axes |= collective_axes(part, counts)
        # A nested shard_map binds axes of its own.
        equation_axes -= set(equation.params.get("manual_axes", ()))
        if equation.primitive.name not in _NOT_SENDING:
            for key in ("axes", "axis_name"):
                equation_axes |= _names(equation.params.get(key, ()))
        if equation_axes and (counts is None or counts(equation)):
            axes |= equation_axes
    result = frozenset(axes)
    if counts is None:
        _known[jaxpr] = result
    return result


def axes_sent_over(update: Callable[..., Any], *args: Any) -> frozenset[str]:
    """Return the names of the axes over which an update of these arguments communicates.

    The set is empty where the update needs arguments of a training step, such as `value`.

    Communication: none; it is only traced.
    """
    try:
        return collective_axes(jax.make_jaxpr(update)(*args))
    except TypeError:
        return frozenset()


def _names(axes: Any) -> set[str]:
    """Return the axes that are names of mapped axes; those of arrays are positions, ints."""
    return {a for a in (axes if isinstance(axes, list | tuple) else (axes,)) if isinstance(a, str)}


def run_where_values_vary(
    fn: Callable[..., PyTree], *operands: PyTree, refused: str | None = None
) -> PyTree:
    """Return `fn(*operands)`, also where jax refuses it because some values differ by device.

    Args:
      fn: a function that `run_as_varying` accepts.
      *operands: its arguments.
      refused: text of the error where `fn` would have to be run as varying and must not be, since
        it holds collectives whose results differ between devices; None: it holds none.

    Raises:
      ValueError: with the text `refused`.

    Communication: that of `fn`.
    """
    try:
        return fn(*operands)
    except (TypeError, AssertionError) as error:
        # Branches and loops that mix constants with what differs between devices; and zeros like a
        # shape of that (`optax.MultiSteps`), of leaves sharded inside a replica: an assertion.
        if not any(map(varying_axes, jax.tree.leaves(operands))):
            raise
        if refused is not None:
            raise ValueError(refused) from error
    return run_as_varying(fn, *operands)


def run_as_varying(fn: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    """Return `fn(*operands)`, where every value is typed as varying over the operands' axes.

    Under `shard_map(check_vma=True)` branches of a conditional must have equal types, and so must
    what a loop carries. A function that returns a constant from one branch, equal on all devices,
    and a varying value from the other, is refused. Here it is traced as if nothing varied, and the
    program is then run with all constants typed like the other values.

    Args:
      fn: a function of arrays alone. Of collectives it may hold those whose results are equal on
        all devices, such as whether something overflowed on one of them.
      *operands: its arguments; `fn` must not close over values of this trace.

    Returns:
      The result of `fn`; every leaf varies over all those axes.

    Communication: that of `fn`.
    """
    leaves, treedef = jax.tree.flatten(operands)
    axes = frozenset().union(*map(varying_axes, leaves))
    plain = treedef.unflatten([_without_type(x) for x in leaves])
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*plain)
    results = _run(closed, axes, leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _without_type(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    explicit = any(entry is not None for entry in aval.sharding.spec)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=aval.sharding if explicit else None,
    )


def _run(program: Any, axes: Iterable[str], operands: Sequence[Any]) -> list[Any]:
    """Return the outputs of a closed or open program, for operands of any type."""

    def typed(x: Any) -> jax.Array:
        return vary_over(jnp.asarray(x), axes)

    def equation(eqn: Any, operands: list[jax.Array]) -> Iterable[jax.Array]:
        return map(typed, _equation(eqn, axes, operands))

    return interpret(program, [typed(x) for x in operands], equation, typed)


def _equation(eqn: Any, axes: Iterable[str], operands: list[jax.Array]) -> Sequence[Any]:
    params = eqn.params
    match eqn.primitive.name:
        case "pvary" | "pcast":  # all values vary over these axes already
            return operands
        case "cond":
            branches = [lambda *x, b=b: _run(b, axes, x) for b in params["branches"]]
            return lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:])
        case "while":
            first = params["cond_nconsts"]
            last = first + params["body_nconsts"]
            to_condition, to_body = operands[:first], operands[first:last]
            return lax.while_loop(
                lambda carry: _run(params["cond_jaxpr"], axes, [*to_condition, *carry])[0],
                lambda carry: _run(params["body_jaxpr"], axes, [*to_body, *carry]),
                operands[last:],
            )
        case "scan":
            consts, carry, xs = scan_operands(params, operands)

            def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
                out = _run(params["jaxpr"], axes, [*consts, *carry, *x])
                return out[: len(carry)], out[len(carry) :]

            carry, ys = lax.scan(body, carry, xs, **scan_options(params))
            return [*carry, *ys]
    # What a shard_map holds has other shapes and axes: it is run as it was traced.
    if eqn.primitive.name != "shard_map" and (inner := called_program(eqn)):
        return _run(inner, axes, operands)
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]


def unnamed_exchanges(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
) -> frozenset[str]:
    """Return the axes of the collectives in an update that no transform of jaxslowmo has made.

    The update is traced with shapes alone. Where that fails the set is empty: the first step then
    raises the error.

    Args:
      tx: any transform.
      params: stacked parameters, or their shapes.
      state: the stacked state of `tx`, or its shapes.
      mesh: the mesh whose axes are bound while the update is traced.
      axis_name: the replica axis.

    Communication: none.
    """
    unnamed: set[str] = set()

    def per_replica(params: PyTree, state: PyTree) -> PyTree:
        update = jax.jit(lambda *operands: _updated(tx, *operands))
        unnamed.update(collective_axes(update.trace(params, state).jaxpr, _is_unnamed))
        return ()

    names = mesh.axis_names
    bound = AbstractMesh(tuple(mesh.shape.values()), names, (AxisType.Auto,) * len(names))
    mapped = map_replicas(
        per_replica, mesh=bound, axis_name=axis_name, in_roles=("stacked", "stacked")
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    try:
        jax.eval_shape(mapped, *shapes)
    except Exception:  # the update may need arguments that only the first step has
        return frozenset()
    return frozenset(unnamed)


def _updated(tx: optax.GradientTransformationExtraArgs, params: PyTree, state: PyTree) -> PyTree:
    extra: dict[str, Any] = {
        "value": jnp.float32(1.0),
        "grad": params,
        "value_fn": lambda p: optax.tree.norm(p, squared=True),
    }
    try:
        return tx.update(params, state, params, **extra)
    except TypeError:  # the transform accepts no extra arguments
        return tx.update(params, state, params)


def _is_unnamed(equation: Any) -> bool:
    scopes = str(equation.source_info.name_stack)
    return not any(name in scopes for name in OF_TRANSFORMS)
