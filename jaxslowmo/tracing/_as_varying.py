"""Functions that were written without thought of varying types, run where values have them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..mesh import vary_over, varying_axes
from ._facts import called_program, scan_operands


def run_where_values_vary(
    fn: Callable[..., PyTree], *operands: PyTree, refused: str | None = None
) -> PyTree:
    """`fn(*operands)`, also where jax refuses it because some values differ between devices.

    Args:
      fn: as `run_as_varying` takes it.
      *operands: what it is called with.
      refused: what the error says where it has to be run as varying and must not be, since it holds
        collectives whose results differ between devices; None: it holds none.

    Raises:
      ValueError: `refused`, where there is that.

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
    """`fn(*operands)`, with every value typed as varying over all axes that operands vary over.

    Under `shard_map(check_vma=True)` branches of a conditional must have equal types, and so must
    what a loop carries. A function that returns a constant from one branch, equal on all devices,
    and from the other what differs, is refused there. Here it is traced as if nothing differed,
    and the program is then run with all constants typed as the rest.

    Args:
      fn: a function of arrays alone. Of collectives it may hold those whose results are equal on
        all devices, such as whether something overflowed on one of them.
      *operands: what it is called with; it must not close over values of this trace.

    Returns:
      Its result; every leaf varies over all those axes.

    Communication: that of `fn`.
    """
    leaves, treedef = jax.tree.flatten(operands)
    axes = frozenset().union(*map(varying_axes, leaves))
    plain = treedef.unflatten([_without_type(x) for x in leaves])
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*plain)
    found = _run(closed, axes, leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


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
    """The outputs of a closed or open program, for operands of any type."""
    jaxpr = getattr(program, "jaxpr", program)
    values: dict[Any, Any] = {}

    def typed(x: Any) -> jax.Array:
        return vary_over(jnp.asarray(x), axes)

    def write(variables: Sequence[Any], results: Sequence[Any]) -> None:
        values.update(zip(variables, map(typed, results), strict=True))

    def read(atom: Any) -> jax.Array:
        if hasattr(atom, "val"):
            return typed(jnp.asarray(atom.val, atom.aval.dtype))
        return values[atom]

    write(jaxpr.constvars, getattr(program, "consts", ()))
    write(jaxpr.invars, operands)
    for eqn in jaxpr.eqns:
        write(eqn.outvars, _equation(eqn, axes, [read(atom) for atom in eqn.invars]))
    return [read(atom) for atom in jaxpr.outvars]


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

            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, ys = lax.scan(body, carry, xs, **options)
            return [*carry, *ys]
    # What a shard_map holds has other shapes and axes: it is run as it was traced.
    if eqn.primitive.name != "shard_map" and (inner := called_program(eqn)):
        return _run(inner, axes, operands)
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]
