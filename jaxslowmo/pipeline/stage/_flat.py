"""Flat programs, dependencies of their values on classes of inputs, and parts of them."""

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
    """Return the type under which jax traces an array, a number or a `ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.make_jaxpr(lambda y: y)(x).in_avals[0]
    return jax.typeof(x)


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the `ShapeDtypeStruct` of a type, with the mapped axes that it varies over."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, manual_axis_type=getattr(aval, "manual_axis_type", None)
    )


def size_in_bytes(v: Atom) -> int:
    """Return the size of an array in bytes."""
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize  # type: ignore[attr-defined]


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """Return `atoms` without the literals."""
    return (v for v in atoms if not isinstance(v, Literal))


def used_by(equations: Iterable[JaxprEqn], outputs: Iterable[Atom]) -> set[Var]:
    """Return the variables that are operands of some equation, or outputs."""
    return {v for atoms in (*(e.invars for e in equations), outputs) for v in variables(atoms)}


Origin = typing.Literal["weights", "microbatch", "x", "dy", "stash"]
"""The class of an input of a program: the argument that it is part of."""

# Changes of layout or dtype of one array need no arithmetic, so the smaller of the two forms is
# stored.
_LAYOUTS = {"broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose"}
_TYPES = {"convert_element_type"}
_NOTES = {"name", "sharding_constraint", "stop_gradient"}
_FREE = _LAYOUTS | _TYPES | _NOTES
# Cheap primitives, of which masks, positions and one-hot vectors of a microbatch are made.
_PIECES = {"concatenate", "dynamic_slice", "iota", "pad", "rev", "slice", "split"}
_ARITHMETIC = {"abs", "add", "clamp", "div", "exp", "log", "mul", "neg", "rem", "sign", "sub"}
_COMPARISONS = {"argmax", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "select_n"}
_BITS = {"and", "not", "or", "shift_left", "shift_right_logical", "xor"}
_SUMS = {"cumsum", "reduce_and", "reduce_max", "reduce_or", "reduce_sum"}
_LIGHT = _FREE | _PIECES | _ARITHMETIC | _COMPARISONS | _BITS | _SUMS


class Cut(NamedTuple):
    """A part of a program: its equations, in order, and the values it needs of other parts."""

    equations: tuple[JaxprEqn, ...]
    handed: tuple[Var, ...]


@dataclass(frozen=True)
class FlatProgram:
    """A flat program, with the origin of each of its inputs."""

    flat: Flat
    origins: Mapping[Var, Origin]  # the origin of every input

    @cached_property
    def _makers(self) -> dict[Var, int]:
        """The position of the equation that computes each value."""
        equations = enumerate(self.flat.equations)
        return {v: i for i, equation in equations for v in equation.outvars}

    @cached_property
    def _depends(self) -> dict[Var, frozenset[str]]:
        """The origins of each value, and `"heavy"` if it takes more than light work."""
        depends: dict[Var, frozenset[str]] = {v: frozenset() for v in self.flat.constants}
        depends.update({v: frozenset({origin}) for v, origin in self.origins.items()})
        for equation in self.flat.equations:
            heavy = set() if equation.primitive.name in _LIGHT else {"heavy"}
            of_all = frozenset(heavy).union(*(depends[v] for v in variables(equation.invars)))
            depends.update(dict.fromkeys(equation.outvars, of_all))
        return depends

    def cheap(self, v: Var) -> bool:
        """Return whether each part computes `v` itself, instead of receiving it from another part.

        A function of weights alone (a cast, a transpose) is as large as they are, a light function
        of the microbatch alone can be computed from it at any time, and another form of a smaller
        array is no work.
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
        """Return the origin of a value: weights or microbatch if these alone determine it."""
        depends = frozenset[str]() if not isinstance(v, Var) else self._depends[v]
        if depends <= {"weights", "heavy"}:
            return "weights"
        return "microbatch" if depends <= {"microbatch"} else "stash"

    def cut(
        self,
        targets: Iterable[Atom],
        elsewhere: Callable[[Var], bool] = lambda v: False,
        *,
        with_effects: bool = False,
    ) -> Cut:
        """Return the part that computes `targets`, from values that are computed `elsewhere`.

        Args:
          targets: values of the program.
          elsewhere: function that returns whether another part computes a value; this part then
            receives the value, unless it is cheap.
          with_effects: whether the part has all equations with side effects, too.
        """
        equations = self.flat.equations
        mine = {i for i, e in enumerate(equations) if with_effects and has_side_effects(e)}
        handed: dict[Var, None] = {}
        seen: set[Var] = set()
        waiting = [v for i in mine for v in variables(equations[i].invars)]
        waiting += list(variables(targets))[::-1]
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            if elsewhere(v) and not self.cheap(v):
                handed[v] = None
            elif (maker := self._makers.get(v)) is not None:
                mine.add(maker)
                waiting.extend(variables(equations[maker].invars))
        return Cut(tuple(equations[i] for i in sorted(mine)), tuple(handed))
