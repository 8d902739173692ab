"""Read from a program whether it computes each element of a leaf from the same elements alone.

A program is followed from its inputs to its outputs; nothing is run. Each value gets the number of
the expression that computes one of its elements: equal numbers mean equal expressions, also between
programs for leaves of other shapes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tracing import CALLS, interpret

# The result of these primitives for an element depends on no other element.
_OF_ELEMENTS = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "cos", "cosh", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}  # fmt: skip
# The result of these primitives is the operand, perhaps elsewhere.
_SAME = {"copy", "reshard", "sharding_constraint", "stop_gradient"}
# Each result of these primitives depends on the operand of its own position.
_SIDE_BY_SIDE = {"optimization_barrier", "pmax", "pmin", "psum"}
_OF_SHAPES = {"shape", "sharding", "broadcast_dimensions", "out_sharding"}


class Element(NamedTuple):
    """What a program says of a value.

    Attributes:
      number: the number of the expression that computes an element of it.
      leaf: position of the parameter of whose leaves it is computed; None if of none.
      combines: whether its elements are computed from others than those at their own place in
        leaves of one parameter.
    """

    number: int
    leaf: int | None
    combines: bool


class ElementReader:
    """A reader of programs, all of whose numbers can be compared."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._held: list[Any] = []  # objects whose `id` is part of an expression

    def input(self, place: Any, *, leaf: int | None, combines: bool) -> Element:
        """Return the value of an input; those at an equal place of two programs are equal."""
        return Element(self._number("input", place), leaf, combines)

    def read(self, program: Any, inputs: Sequence[Element]) -> list[Element]:
        """Return the values of the outputs of a program, an open or closed jaxpr."""
        return interpret(program, inputs, self._equation, self._constant)

    def _number(self, *expression: Any) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def _equation(self, eqn: Any, operands: list[Element]) -> list[Element]:
        name, params = eqn.primitive.name, eqn.params
        called = params.get(CALLS.get(name, ""))
        if called is not None:
            return self.read(called, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name in _SAME:
            return operands
        if name in _SIDE_BY_SIDE and len(operands) > 1:
            each = zip(operands, eqn.invars, eqn.outvars, strict=True)
            return [self._operation(eqn, [x], [i], [o])[0] for x, i, o in each]
        return self._operation(eqn, operands, eqn.invars, eqn.outvars)

    def _operation(
        self, eqn: Any, operands: list[Element], invars: Sequence[Any], outvars: Sequence[Any]
    ) -> list[Element]:
        name = eqn.primitive.name
        combines = any(x.combines for x in operands) or len(_leaves(operands)) > 1
        if name == "broadcast_in_dim" and not combines and not invars[0].aval.shape:
            return operands[:1]  # every element of a broadcast number is that number
        combines |= name not in _OF_ELEMENTS
        # The expression of an element says nothing of shapes: leaves of other shapes have it, too.
        options = {k: x for k, x in eqn.params.items() if combines or k not in _OF_SHAPES}
        types = [str(v.aval) for v in (*invars, *outvars)] if combines else ()
        key = name, *(x.number for x in operands), str(options), *types
        return [self._result((*key, i), operands, v, combines) for i, v in enumerate(outvars)]

    def _cond(self, eqn: Any, operands: list[Element]) -> list[Element]:
        index, *rest = operands
        branches = [self.read(branch, rest) for branch in eqn.params["branches"]]
        results = []
        for var, *each in zip(eqn.outvars, *branches, strict=True):
            # An index of leaves selects all elements by some of them.
            combines = index.leaf is not None or any(x.combines for x in each)
            key = "cond", index.number, *(x.number for x in each)
            results.append(self._result(key, [index, *each], var, combines))
        return results

    def _result(self, key: Any, operands: list[Element], var: Any, combines: bool) -> Element:
        leaves = _leaves(operands)
        is_number = not getattr(var.aval, "shape", ())
        # A number that leaves have no part in is one for all elements, whatever it is made of.
        combines = len(leaves) > 1 or (combines and (bool(leaves) or not is_number))
        return Element(self._number(*key), min(leaves, default=None), combines)

    def _constant(self, x: Any) -> Element:
        x = object() if x is None else x  # it is not in the program
        self._held.append(x)
        key: Any = id(x)
        if isinstance(x, np.ndarray | np.generic) and np.ndim(x) == 0:
            key = str(x.dtype), x.tobytes()
        return Element(self._number("constant", key), None, bool(np.ndim(x)))


def _leaves(values: Sequence[Element]) -> set[int]:
    return {x.leaf for x in values if x.leaf is not None}
