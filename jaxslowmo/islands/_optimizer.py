"""An outer optimizer of optax whose program NumPy runs, to the same bits on every machine.

Compilers fuse and reorder; so two islands with other processors or releases of jax would drift
apart, bit by bit. NumPy rounds after each operation, as IEEE 754 says. The optimizer's own program
is traced once, and its equations are run one by one.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
import optax

from .._support.types import PyTree
from ..tracing import InlinedProgram, run, trace_inline
from ..transform import ParameterTransform

_Apply = Callable[..., Any]


def _on_scalars(apply: _Apply) -> _Apply:
    """Return a function of single numbers, computed in float64 and rounded once."""

    def run(*args: Any) -> Any:
        if any(np.size(x) != 1 for x in args):
            return None
        dtype = np.result_type(args[0])
        return np.asarray(apply(*(np.float64(np.reshape(x, ())) for x in args)), dtype)

    return run


def _power(x: Any, exponent: int) -> Any:
    """Return a power by products alone: libraries compute others in ways of their own."""
    result = functools.reduce(operator.mul, [x] * abs(exponent), np.ones_like(x, shape=()))
    return np.ones_like(x, shape=()) / result if exponent < 0 else result


# Operations that IEEE 754 rounds correctly, or that do not round.
_EXACT: dict[str, _Apply] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil,
    "copy": lambda x: x, "copy_p": lambda x: x, "div": np.divide, "eq": np.equal,
    "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
    "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.bitwise_not,
    "or": np.bitwise_or, "sign": np.sign, "sqrt": np.sqrt,
    "square": lambda x: x * x, "stop_gradient": lambda x: x, "sub": np.subtract,
}  # fmt: skip
# Of single numbers, such as the rates of schedules and corrections of a bias.
_ON_SCALARS: dict[str, _Apply] = {
    "cos": _on_scalars(np.cos), "exp": _on_scalars(np.exp), "log": _on_scalars(np.log),
    "pow": _on_scalars(np.power), "sin": _on_scalars(np.sin), "tanh": _on_scalars(np.tanh),
}  # fmt: skip
# Releases of jax differ in where they convert and broadcast, so fingerprints leave these out.
_RELEASE_DEPENDENT = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}
)


def _numpy_function(equation: Any) -> _Apply | None:
    """Return the NumPy function of an equation; None if it can't, or not to the same bits."""
    name, options = equation.primitive.name, equation.params
    if name == "integer_pow":
        return lambda x: _power(x, options["y"])
    if name == "convert_element_type":
        return lambda x: np.asarray(x).astype(options["new_dtype"], copy=False)
    if name == "select_n":
        return lambda which, *cases: np.where(which, *cases[::-1]) if len(cases) == 2 else None
    if name in ("broadcast_in_dim", "reshape", "squeeze"):
        return functools.partial(_reshape_scalar, options.get("shape"))
    if name == "clamp":
        return lambda low, x, high: np.minimum(np.maximum(x, low), high)
    return _EXACT.get(name) or _ON_SCALARS.get(name)


def _reshape_scalar(shape: Any, x: Any) -> Any:
    """Return a number in another shape; an array only in its own."""
    if shape is None:  # `squeeze`
        return np.reshape(x, ()) if np.size(x) == 1 else None
    if np.size(x) == 1:
        return np.broadcast_to(np.reshape(x, ()), shape)
    return x if np.shape(x) == tuple(shape) else None


class InexactError(ValueError):
    """The error that a program has an operation of which NumPy would not give the same bits."""


class HostOptimizer:
    """An optax transform on a model of float32 arrays.

    Args:
      optimizer: any element-wise optax optimizer: `optax.sgd`, with or without Nesterov,
        `optax.adamw`, `js.slow_momentum`.
      params: a tree of arrays or their types; only shapes matter.

    Attributes:
      shapes: shapes of the leaves of the model.
      state_types: shapes and dtypes of the arrays of the state.
      fingerprint: digest of what the program computes; it is equal on islands with the same
        optimizer, whatever their release of jax.

    Raises:
      ValueError: an operation of which NumPy would not give the same bits everywhere, by name.
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: PyTree) -> None:
        optimizer = optax.with_extra_args_support(optimizer)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), params)
        leaves, tree = jax.tree.flatten(like)
        with jax.enable_x64(False):
            state, states = jax.tree.flatten(jax.eval_shape(optimizer.init, like))

            def update(*arrays: Any) -> list[Any]:
                parts = arrays[: len(leaves)], arrays[-len(leaves) :]
                displacement, params = (jax.tree.unflatten(tree, part) for part in parts)
                old = jax.tree.unflatten(states, arrays[len(leaves) : -len(leaves)])
                return jax.tree.leaves(optimizer.update(displacement, old, params))

            self._init = trace_inline(
                lambda *x: jax.tree.leaves(optimizer.init(jax.tree.unflatten(tree, x))), leaves
            )
            self._update = trace_inline(update, [*leaves, *state, *leaves])
        self.shapes = [x.shape for x in leaves]
        self.state_types = [(x.shape, np.dtype(x.dtype)) for x in state]
        lines = [*_output_expressions(self._init), *_output_expressions(self._update)]
        self.fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def init(self, params: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of the first state."""
        return _run(self._init, params)

    def step(
        self,
        displacement: Sequence[np.ndarray],
        state: Sequence[np.ndarray],
        params: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the parameters and the state after one step along a displacement."""
        results = _run(self._update, [*displacement, *state, *params])
        updates, new_state = results[: len(params)], results[len(params) :]
        return [np.add(p, u, out=u) for p, u in zip(params, updates, strict=True)], new_state


def checked_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Return the outer optimizer; raise `ValueError` for what is none, or is not element-wise."""
    if not isinstance(optimizer, optax.GradientTransformation) or isinstance(
        optimizer, ParameterTransform
    ):
        raise ValueError(
            "islands.join: `outer_optimizer` must be an optax gradient transform, got "
            f"{type(optimizer).__name__}."
        )
    try:
        HostOptimizer(optimizer, {"w": np.zeros(2, np.float32)})
    except InexactError:
        raise
    except Exception:  # it may need the model's own tree, with which joining checks it
        pass
    return optimizer


def _run(program: InlinedProgram, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the results of a program, each of whose equations NumPy computes."""

    def evaluate(equation: Any, operands: Sequence[Any]) -> list[np.ndarray]:
        apply = _numpy_function(equation)
        result = None if apply is None else apply(*map(np.asarray, operands))
        if result is None:
            raise _inexact_error(equation)
        return [np.asarray(result).astype(equation.outvars[0].aval.dtype, copy=False)]

    values = dict(zip(program.inputs, inputs, strict=True)) | program.constants
    with np.errstate(all="ignore"):
        results = run(program.equations, program.outputs, values, evaluate)
    input_ids = set(map(id, inputs))
    # The caller may change the results in place; most are new arrays already.
    return [np.array(x) if id(x) in input_ids or not x.flags.owndata else x for x in results]


def _output_expressions(program: InlinedProgram) -> Iterator[str]:
    """Yield what a program computes; raise `ValueError` for what NumPy can't run."""
    names = {x: f"input {i}" for i, x in enumerate(program.inputs)}
    names |= {x: str(np.ravel(value).tolist()) for x, value in program.constants.items()}

    def name_of(x: Any) -> str:
        is_number = isinstance(x, jex.Literal)
        return str(float(np.float32(np.reshape(x.val, ())))) if is_number else names[x]

    for equation in program.equations:
        name, operands = equation.primitive.name, [name_of(x) for x in equation.invars]
        sizes = [math.prod(getattr(x.aval, "shape", ())) for x in equation.invars]
        if _numpy_function(equation) is None or (name in _ON_SCALARS and max(sizes) > 1):
            raise _inexact_error(equation)
        (result,) = equation.outvars
        text = f"{name}{equation.params.get('y', '')}({', '.join(operands)})"
        if name in _RELEASE_DEPENDENT:
            text = operands[0]
        names[result] = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()
    yield from map(name_of, program.outputs)


def _inexact_error(equation: Any) -> InexactError:
    name = equation.primitive.name
    return InexactError(
        f"islands.join: `outer_optimizer` must be element-wise and of operations that round alike "
        f"on every machine, got {name!r} on {', '.join(str(x.aval) for x in equation.invars)}."
    )
