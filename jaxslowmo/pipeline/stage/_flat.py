"""Flat programs whose inputs have known origins: what depends on what, and parts of them."""

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from ...tracing import Atom, Flat, has_side_effects


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


def size_in_bytes(v: Atom) -> int:
    """Bytes of one array."""
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize  # type: ignore[attr-defined]


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """`atoms` without the literals."""
    return (v for v in atoms if not isinstance(v, Literal))


def used_by(equations: Iterable[JaxprEqn], outputs: Iterable[Atom]) -> set[Var]:
    """Values that some equation takes, or that are given out."""
    return {v for atoms in (*(e.invars for e in equations), outputs) for v in variables(atoms)}


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
