"""Flat programs of equations: trace one, follow what depends on what, and take a part of it.

The only package of pipelines that knows how jax writes its equations down.
"""

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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


def is_loop(equation: JaxprEqn) -> bool:
    """Return whether an equation is a scan that may become two."""
    return equation.primitive.name == "scan" and not equation.effects


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


Origin = typing.Literal["weights", "microbatch", "x", "dy", "stash"]
"""Where an input of a program comes from."""

# Other layouts and types of one array: no arithmetic, so the smaller form is what is handed over.
_LAYOUTS = {"broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose"}
_TYPES = {"convert_element_type", "pcast", "pvary", "reduced_vary_cast", "reduced_vary_cast_p"}
_NOTES = {"name", "sharding_constraint", "stop_gradient"}
_FREE = _LAYOUTS | _TYPES | _NOTES
# Cheap on each element: what a mask, a position or a one-hot of a microbatch is made of.
_PIECES = {"concatenate", "dynamic_slice", "iota", "pad", "rev", "slice", "split"}
_ARITHMETIC = {"abs", "add", "clamp", "div", "exp", "log", "mul", "neg", "rem", "sign", "sub"}
_COMPARISONS = {"argmax", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "select_n"}
_BITS = {"and", "not", "or", "shift_left", "shift_right_logical", "xor"}
_SUMS = {"cumsum", "reduce_and", "reduce_max", "reduce_or", "reduce_sum"}
_LIGHT = _FREE | _PIECES | _ARITHMETIC | _COMPARISONS | _BITS | _SUMS


class Cut(NamedTuple):
    """A part of a program: its equations, in order, and the values of others that it needs."""

    equations: tuple[JaxprEqn, ...]
    handed: tuple[Var, ...]


@dataclass(frozen=True)
class FlatProgram:
    """A flat program whose inputs have known origins."""

    flat: Flat
    origins: Mapping[Var, Origin]  # of every input

    @cached_property
    def _makers(self) -> dict[Var, int]:
        """Position of the equation that makes a value."""
        equations = enumerate(self.flat.equations)
        return {v: i for i, equation in equations for v in equation.outvars}

    @cached_property
    def _depends(self) -> dict[Var, frozenset[str]]:
        """Origins of a value, and `"heavy"` where more than light work lies between."""
        found: dict[Var, frozenset[str]] = {v: frozenset() for v in self.flat.constants}
        found.update({v: frozenset({origin}) for v, origin in self.origins.items()})
        for equation in self.flat.equations:
            heavy = set() if equation.primitive.name in _LIGHT else {"heavy"}
            of_all = frozenset(heavy).union(*(found[v] for v in variables(equation.invars)))
            found.update(dict.fromkeys(equation.outvars, of_all))
        return found

    def cheap(self, v: Var) -> bool:
        """Whether a part computes `v` again where it needs it, rather than to have it handed.

        What weights alone determine (a cast, a transpose) is as large as they are, what a
        microbatch alone determines waits with it, and another form of a smaller array is no work.
        """
        maker = self._makers.get(v)
        if maker is None:
            return False
        if self._depends[v] <= {"weights", "heavy"} or self._depends[v] <= {"microbatch"}:
            return True
        equation = self.flat.equations[maker]
        sources = list(variables(equation.invars))
        free = equation.primitive.name in _FREE and len(sources) == 1
        return free and size_in_bytes(sources[0]) <= size_in_bytes(v)

    def origin_of(self, v: Atom) -> Origin:
        """Where a value comes from: weights or microbatch if these alone determine it."""
        depends = frozenset[str]() if not isinstance(v, Var) else self._depends[v]
        if depends <= {"weights", "heavy"}:
            return "weights"
        return "microbatch" if depends <= {"microbatch"} else "stash"

    def needed_inputs(self, wanted: Iterable[Atom]) -> set[Var]:
        """Inputs of the program that `wanted` values depend on."""
        wanted = tuple(wanted)
        equations = self.cut(wanted).equations
        return used_by(equations, wanted) & set(self.flat.inputs)

    def cut(
        self, wanted: Iterable[Atom], elsewhere: Callable[[Var], bool] = lambda v: False
    ) -> Cut:
        """The equations that `wanted` values need, back to values that are computed `elsewhere`.

        Args:
          wanted: values of the program.
          elsewhere: whether a value is there already; then it is handed over, unless it is cheap.
        """
        mine: set[int] = set()
        handed: dict[Var, None] = {}
        seen: set[Var] = set()
        waiting = list(variables(wanted))[::-1]
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            if elsewhere(v) and not self.cheap(v):
                handed[v] = None
            elif (maker := self._makers.get(v)) is not None:
                mine.add(maker)
                waiting.extend(variables(self.flat.equations[maker].invars))
        return Cut(self._in_order(mine), tuple(handed))

    def and_effects(self, equations: Iterable[JaxprEqn]) -> tuple[JaxprEqn, ...]:
        """`equations`, and those with side effects: they stay, though nothing needs them."""
        effects = list(filter(has_side_effects, self.flat.equations))
        needed = self.cut(v for e in effects for v in e.invars).equations
        return self._in_order({self._position[id(e)] for e in (*equations, *effects, *needed)})

    @cached_property
    def _position(self) -> dict[int, int]:
        return {id(equation): i for i, equation in enumerate(self.flat.equations)}

    def _in_order(self, positions: Iterable[int]) -> tuple[JaxprEqn, ...]:
        return tuple(self.flat.equations[i] for i in sorted(positions))
