"""Programs as jax writes them down: traversed, split, and asked over which axes they communicate.

No other package has a walker of its own. What reads programs takes `interpret` to compute something
with their equations (facts, types, expressions), and `equations_in` to look at every equation; what
splits programs, as `pipeline/_split_stage.py` does, takes `trace_inline` and `run`.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType

from .._support.private_jax import is_axis_effect
from .._support.scopes import OF_TRANSFORMS
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, model_axes

_Value = TypeVar("_Value")
Atom = Var | Literal
Override = Callable[[JaxprEqn, list[Any]], Sequence[Any] | None]


def interpret(
    program: Any,
    inputs: Sequence[_Value],
    equation: Callable[[Any, list[_Value]], Iterable[_Value]],
    constant: Callable[[Any], _Value],
    *,
    literal: Callable[[Any], _Value] | None = None,
) -> list[_Value]:
    """Return the outputs of a program, computed with values of the caller's own.

    Args:
      program: a jaxpr, closed or open.
      inputs: a value for each of its inputs.
      equation: `equation(eqn, operands)` returns a value for each output of an equation. It is
        called in the order of the program; programs inside of an equation are its own affair, such
        as by `called_program` and another `interpret`.
      constant: `constant(x)` returns the value of an array that the program holds: of a NumPy array
        for numbers that are written into it, and None for a constant of an open jaxpr.
      literal: `literal(x)` returns the value of a number that is written into the program, as jax
        holds it, with a weak type perhaps; None: by `constant`.

    Communication: none of its own.
    """
    jaxpr = getattr(program, "jaxpr", program)
    constants = getattr(program, "consts", ()) or [None] * len(jaxpr.constvars)
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(zip(jaxpr.constvars, map(constant, constants), strict=True))

    def read(atom: Any) -> _Value:
        if hasattr(atom, "val"):
            if literal is not None:
                return literal(atom.val)
            return constant(np.asarray(atom.val, atom.aval.dtype))
        return values[atom]

    last = {v: eqn for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
    last |= {v: None for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
        for v in {v for v in eqn.invars if isinstance(v, Var) and last[v] is eqn}:
            del values[v]  # islands compute with whole arrays, which need not stay
    return [read(atom) for atom in jaxpr.outvars]


def programs_in(equation: Any) -> Iterator[Any]:
    """Yield the programs that an equation holds, of calls, loops and branches, as they stand."""
    for value in equation.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


def equations_in(program: Any) -> Iterator[Any]:
    """Yield all equations of a program, each before those of the programs that it holds."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations_in(inner)


def constants_in(program: Any) -> Iterator[Any]:
    """Yield the arrays that a program holds, and those of all programs inside of it."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        for inner in programs_in(equation):
            yield from constants_in(inner)


def scan_operands(params: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the operands of a `scan` equation as constants, carry and what it scans over."""
    if "num_carry" in params:  # jax < 0.12
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        return [*operands[:first]], [*operands[first:last]], [*operands[last:]]
    consts, carry, xs = (list(group) for group in params["ft_in"].update(operands).unpack())
    return consts, carry, xs


def read_loop(
    eqn: Any,
    read: Callable[[Any, list[_Value]], list[_Value]],
    operands: list[_Value],
    join: Callable[..., _Value],
) -> tuple[list[_Value], list[_Value]]:
    """Return the outputs of a `scan` or `while` of any length, and those of its last iteration.

    Args:
      eqn: the equation of the loop.
      read: `read(program, inputs)` returns the outputs of a program.
      operands: a value for each operand of the loop.
      join: `join(value, after, *ends)` adds to a carried value what it is after an iteration, where
        `ends` are the outputs of the condition of a `while`, until nothing changes.
    """
    params, places = eqn.params, [*range(len(operands))]
    condition: tuple[Any, list[int]] | None = None
    if eqn.primitive.name == "scan":
        consts, carry, xs = scan_operands(params, places)
        body, takes = params["jaxpr"], [*consts, *carry, *xs]
    else:
        first = params["cond_nconsts"]
        carry = places[first + params["body_nconsts"] :]
        body, takes = params["body_jaxpr"], places[first:]
        condition = params["cond_jaxpr"], [*places[:first], *carry]
    outputs, before = [], None
    while operands != before:
        before, operands = operands, [*operands]
        outputs = read(body, [operands[p] for p in takes])
        ends = [] if condition is None else read(condition[0], [operands[p] for p in condition[1]])
        for place, after in zip(carry, outputs, strict=False):
            operands[place] = join(operands[place], after, *ends)
    return [*(operands[p] for p in carry), *outputs[len(carry) :]], outputs


def called_program(eqn: Any) -> Any:
    """Return the program that an equation calls once with its own operands, or None."""
    programs = list(programs_in(eqn))
    if len(programs) != 1:
        return None
    jaxpr = getattr(programs[0], "jaxpr", programs[0])
    fits = len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars)
    return programs[0] if fits else None


# Programs without calls, to be split.

# Calls that may be replaced by their equations, and the parameter that holds these. A checkpointed
# function is one of them: both parts of a backward pass need values that it computes again, and
# only its equations tell which part needs which.
CALLS = {
    "jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip


@dataclass(frozen=True)
class InlinedProgram:
    """A traced function of arrays: equations in order, calls inlined where that is possible."""

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[JaxprEqn, ...]
    constants: dict[Var, Any]  # arrays that the function closes over


def trace_inline(fn: Callable[..., Sequence[Any]], types: Sequence[Any]) -> InlinedProgram:
    """Return the equations of `fn`, which maps arrays of `types` to a sequence of arrays.

    Communication: none; it is only traced.
    """
    whole = jax.make_jaxpr(lambda *args: tuple(fn(*args)))(*types)
    # Traced again with the calls inlined: their equations get variables of this trace.
    inlined = jax.make_jaxpr(lambda *args: tuple(_run(whole, args, _inline_call)))(*types)
    jaxpr = inlined.jaxpr
    constants = dict(zip(jaxpr.constvars, inlined.consts, strict=True))
    return InlinedProgram(tuple(jaxpr.invars), tuple(jaxpr.outvars), tuple(jaxpr.eqns), constants)


def run(
    equations: Iterable[JaxprEqn],
    outputs: Sequence[Atom],
    inputs: Mapping[Var, Any],
    override: Override = lambda equation, operands: None,
) -> list[Any]:
    """Return the values of `outputs`, by the equations of an inlined program in their order.

    Args:
      equations: the equations to compute, in order.
      outputs: the variables whose values are returned.
      inputs: maps the variables that no equation computes to their values.
      override: returns the results of an equation from its operands, or None to compute it
        unchanged.

    Communication: that of the equations.
    """
    program = SimpleNamespace(invars=[*inputs], constvars=(), eqns=[*equations], outvars=outputs)
    return _run(program, [*inputs.values()], override)


def has_side_effects(equation: JaxprEqn) -> bool:
    """Return whether an equation prints or calls back to the host, beside giving its results."""
    return not all(map(is_axis_effect, equation.effects))


def _run(program: Any, inputs: Sequence[Any], override: Override) -> list[Any]:
    def evaluate(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = override(equation, operands)
        return _bind(equation, operands) if results is None else results

    return interpret(program, inputs, evaluate, lambda x: x, literal=lambda x: x)


def _inline_call(equation: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Return the results of a call, computed by its equations if these may replace the call."""
    params = equation.params
    called = params.get(CALLS.get(equation.primitive.name, ""))
    placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    laid_out = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in placed)
    # A call says more than its equations where it places arrays or has a compiler's options.
    if called is None or laid_out or params.get("compiler_options_kvs"):
        return None
    with _scope(equation):
        return _run(called, operands, _inline_call)


def _bind(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    with _scope(equation):
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*operands, **params)
    return results if equation.primitive.multiple_results else [results]


@contextmanager
def _scope(equation: JaxprEqn) -> Iterator[None]:
    """Run the block under the scopes, source lines and settings of an equation."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
        yield


# Axes over which programs communicate, and between whose positions results differ.

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
        return read_loop(eqn, varying_axes, operands, frozenset.union)[0]
    if inner := called_program(eqn):
        return varying_axes(inner, operands)
    return [together] * len(eqn.outvars)


def loss_arguments(grads: Any, value: Any) -> dict[str, Any]:
    """Return the extra arguments of an update by name: what a training step knows of the loss."""
    norm = functools.partial(optax.tree.norm, squared=True)
    return {"value": value, "grad": grads, "value_fn": lambda params, *_, **__: norm(params)}


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
