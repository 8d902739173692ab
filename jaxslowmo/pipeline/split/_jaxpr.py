"""Flat programs of equations: trace one, follow what depends on what, and run a part of it.

The only file of the package that knows how jax writes its equations down.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import source_info_util  # No public way says to which scope an equation belongs,
from jax._src.core import NamedAxisEffect  # or which effect is a collective's.
from jax.extend.core import JaxprEqn, Literal, Var

from ...mesh import vary_over

Atom = Var | Literal

# Calls whose equations may as well stand where the call stands, and the parameter that holds them.
# A checkpointed function belongs to them: what it computes again is needed by both parts of a
# backward pass, and only its equations tell which of it by which.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass(frozen=True)
class Flat:
    """A traced function of arrays: equations in order, calls opened where that is possible."""

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[JaxprEqn, ...]
    constants: dict[Var, Any]  # arrays that the function closes over


def trace(fn: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Flat:
    """The equations of `fn`, which maps arrays of `types` to a sequence of arrays."""
    whole = jax.make_jaxpr(lambda *args: tuple(fn(*args)))(*types)
    # Traced again with the calls opened: their equations get variables of this trace.
    opened = jax.make_jaxpr(lambda *args: tuple(_evaluate(whole.jaxpr, whole.consts, args)))(*types)
    jaxpr = opened.jaxpr
    return Flat(
        tuple(jaxpr.invars),
        tuple(jaxpr.outvars),
        tuple(jaxpr.eqns),
        dict(zip(jaxpr.constvars, opened.consts, strict=True)),
    )


def run(equations: Iterable[JaxprEqn], outputs: Sequence[Atom], known: dict[Var, Any]) -> list[Any]:
    """Values of `outputs`: `equations` done in their order, from `known` values."""
    return perform(equations, outputs, known, lambda equation, operands: None)


def perform(
    equations: Iterable[JaxprEqn],
    outputs: Sequence[Atom],
    known: dict[Var, Any],
    instead: Callable[[JaxprEqn, Sequence[Any]], Sequence[Any] | None],
) -> list[Any]:
    """As `run`, but where `instead` has results for an equation and its operands, with those."""
    values = dict(known)
    for equation in equations:
        operands = [_read(values, v) for v in equation.invars]
        results = instead(equation, operands)
        results = _bind(equation, operands) if results is None else results
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(values, v) for v in outputs]


def type_of(x: Any) -> Any:
    """The type under which jax traces an array, a number or a `ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.make_jaxpr(lambda y: y)(x).in_avals[0]
    return jax.typeof(x)


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What the program of a stage tells of a type, axes that it varies over included."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, manual_axis_type=getattr(aval, "manual_axis_type", None)
    )


def scan_sizes(equation: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan do not change, and how many are carried; the rest is sliced."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 says it by the structure of its operands.
    consts, carry, _ = params["ft_in"].update(equation.invars).unpack()
    return len(list(consts)), len(list(carry))


def size_in_bytes(v: Atom) -> int:
    """Bytes of one array."""
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize  # type: ignore[attr-defined]


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """`atoms` without the literals."""
    return (v for v in atoms if not isinstance(v, Literal))


def used_by(equations: Iterable[JaxprEqn], outputs: Iterable[Atom]) -> set[Var]:
    """Values that some equation takes, or that are given out."""
    return {v for atoms in (*(e.invars for e in equations), outputs) for v in variables(atoms)}


def has_side_effects(equation: JaxprEqn) -> bool:
    """Whether it is done for more than its results: it prints, or calls back to the host."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in equation.effects)


def _evaluate(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """What `jaxpr` computes, calls opened."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
    return perform(jaxpr.eqns, jaxpr.outvars, values, _opened)


def _opened(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Results of a call, of its equations."""
    called = _called(equation)
    if called is None:
        return None
    with _scope(equation):
        inner = getattr(called, "jaxpr", called)
        return _evaluate(inner, getattr(called, "consts", ()), operands)


def _called(equation: JaxprEqn) -> Any:
    """The program that `equation` calls, if its equations may stand in its place."""
    params = equation.params
    called = params.get(_CALLS.get(equation.primitive.name, ""))
    placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    laid_out = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in placed)
    # A call says more than its equations where it places arrays or has a compiler's options.
    return None if laid_out or params.get("compiler_options_kvs") else called


def _bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    if equation.primitive.name == "pvary":
        # What was equal over an axis where it was traced may be typed as varying here already.
        return [vary_over(x, equation.params["axes"]) for x in operands]
    with _scope(equation):
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


@contextmanager
def _scope(equation: JaxprEqn) -> Iterator[None]:
    """The scopes, source lines and settings under which `equation` was written."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
        yield


def _read(values: dict[Var, Any], v: Atom) -> Any:
    return v.val if isinstance(v, Literal) else values[v]
