"""Tell from the program of a transform whether it treats every element of every leaf alike.

Such a transform, for example AdamW without masks, has the same result on the buffers of all stages
as on the leaves in them. It needs neither a branch per stage nor memory for results of branches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ..._support.types import PyTree
from ...tracing import called_program, interpret
from ...tree import Staged
from ._buffer_packing import BufferPacking

# The result of these primitives for an element depends on no other element.
_ELEMENTWISE = frozenset(
    [
        *["abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "cos"],
        *["div", "eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite"],
        *["le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or"],
        *["pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"],
        *["stop_gradient", "sub", "tanh", "xor"],
    ]
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call"})
_OF_SHAPES = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})


class _NotElementwiseError(Exception):
    """The program has an operation that is not known to treat every element alike."""


class _Value(NamedTuple):
    """The expression that a value of the program is computed by.

    Attributes:
      number: number of the expression; equal expressions of different leaves have the same number.
      leaf: position of the parameter that the value depends on; None if it depends on none.
    """

    number: int
    leaf: int | None


@functools.lru_cache(maxsize=64)
def is_elementwise(packing: BufferPacking, tx: optax.GradientTransformationExtraArgs) -> bool:
    """Return whether `tx` treats an element of a buffer as it treats the same element of a leaf.

    The programs of its update are traced for the model's leaves and for the buffers, and compared.
    The result is False if the update needs more than gradients, state and parameters, or has an
    operation that is not known to be elementwise.
    """
    dtypes = {name: np.dtype(name.partition("/")[0]) for name in packing.axes}
    leaves = [jax.ShapeDtypeStruct(x.shape, dtypes[x.buffer]) for (x,) in packing.leaves]
    buffers = [jax.ShapeDtypeStruct(s, dtypes[n]) for n, s in packing.shapes.items()]
    staged = packing.staged(dict(zip(packing.shapes, buffers, strict=True)))
    reader = _ExpressionReader()
    try:
        of_leaves = _expressions(reader, tx, packing.outer.unflatten(leaves), packing.mirrors)
        of_buffers = _expressions(reader, tx, staged, lambda x: isinstance(x, Staged))
    except Exception:  # not elementwise, or the update needs further arguments
        return False
    of_buffer = dict(zip(packing.shapes, of_buffers, strict=True))
    pairs = zip(packing.leaves, of_leaves, strict=True)
    return all(of_buffer[leaf.buffer] == numbers for (leaf,), numbers in pairs)


def _expressions(
    reader: "_ExpressionReader", tx: Any, params: PyTree, mirrors: Callable[[Any], bool]
) -> list[tuple[int, ...]]:
    """Return the expressions of each parameter's update and state.

    Raises:
      _NotElementwiseError: an expression that depends on several leaves, or is not elementwise.
    """
    types = jax.tree.leaves(params)
    state = jax.eval_shape(tx.init, params)
    nodes, structure = jax.tree.flatten(state, is_leaf=mirrors)
    closed, results = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    inputs = [reader.of("grads", i) for i in range(len(types))]
    for number, node in enumerate(nodes):
        if mirrors(node):
            kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(node)]
            # Moments may have other dtypes than parameters, but not other shapes.
            if [shape for shape, _ in kinds] != [x.shape for x in types]:
                raise _NotElementwiseError
            inputs += [reader.of(f"state {number} {d}", i) for i, (_, d) in enumerate(kinds)]
        else:
            inputs += [reader.of(f"shared {number}", None)] * len(jax.tree.leaves(node))
    inputs += [reader.of("params", i) for i in range(len(types))]
    values = iter(reader.run(closed, inputs))
    numbers: list[list[int]] = [[] for _ in types]
    for node in (results[0], *structure.flatten_up_to(results[1])):
        is_like = mirrors(node)
        for i, _ in enumerate(jax.tree.leaves(node)):
            value = next(values)
            if value.leaf not in ((None, i) if is_like else (None,)):
                raise _NotElementwiseError
            if is_like:
                numbers[i].append(value.number)
    return [tuple(of_leaf) for of_leaf in numbers]


class _ExpressionReader:
    """A numbering of expressions, in which equal expressions have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, key: Any, leaf: int | None) -> _Value:
        """Return the value of the expression with this key."""
        return _Value(self._numbers.setdefault(key, len(self._numbers)), leaf)

    def run(self, program: Any, inputs: list[_Value]) -> list[_Value]:
        """Return the values of a program's outputs."""
        return interpret(program, inputs, self._equation, self._constant)

    def _constant(self, x: Any) -> _Value:
        if x is None or np.ndim(x):
            raise _NotElementwiseError
        return self.of(f"{x.dtype} {x}", None)

    def _equation(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        if name in _CALLS and (inner := called_program(equation)):
            return self.run(inner, operands)
        leaves = {x.leaf for x in operands} - {None}
        if len(leaves) > 1:
            raise _NotElementwiseError
        leaf = next(iter(leaves), None)
        if name == "broadcast_in_dim" and not equation.invars[0].aval.shape:
            return operands[:1]  # a broadcast number has the same value in every element
        if leaf is None and any(v.aval.shape for v in equation.outvars):
            raise _NotElementwiseError  # an array of no leaf, such as noise of a leaf's shape
        if leaf is not None and name not in _ELEMENTWISE:
            raise _NotElementwiseError
        options = {k: str(x) for k, x in equation.params.items() if k not in _OF_SHAPES}
        key = name, tuple(x.number for x in operands), tuple(sorted(options.items()))
        return [self.of((*key, i), leaf) for i in range(len(equation.outvars))]
