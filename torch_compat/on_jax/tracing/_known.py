"""Values of tensors that depend only on constants, computed if torch needs them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from jax.core import Tracer

from ._torchax import Tensor
from ._views import View

# Errors of jax if an operation needs a value that a trace does not have. The first is for `if` and
# `item`, the last for boolean indices.
VALUE_NEEDED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def constant_value(array: Any) -> Any:
    """Return the value of an array that depends only on constants, else None.

    Operations on constants stay in the traced program, so that it has no large literals; this runs
    them now for one value, and does not keep the results. Random numbers of a traced key depend on
    that key, so they are not constants.
    """
    if not isinstance(array, Tracer):
        return array
    values: dict[Any, Any] = {}  # by variable of the traced program
    pending = [array]
    with jax.ensure_compile_time_eval():
        while pending:
            tracer = pending[-1]
            if _read(values, tracer) is not None:
                pending.pop()
                continue
            # Only tracers of jit have their equation; others are arguments.
            equation = getattr(tracer, "parent", None)
            if equation is None or equation.effects:
                return None
            missing = [x for x in equation.in_tracers if _read(values, x) is None]
            pending += missing
            if not missing:
                _run(equation, values)
        return _read(values, array)


def _read(values: dict[Any, Any], tracer: Any) -> Any:
    """Return the value of a tracer if it is computed already, else None."""
    get_const = getattr(tracer, "get_const", None)
    value = None if get_const is None else get_const()
    if isinstance(value, Tracer):  # of the enclosing function
        return constant_value(value)
    return value if value is not None else values.get(getattr(tracer, "val", None))


def _run(equation: Any, values: dict[Any, Any]) -> None:
    """Compute one equation, whose operands have values, and add its results to `values`."""
    operands = [_read(values, x) for x in equation.in_tracers]
    parameters = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*operands, **parameters)
    if not equation.primitive.multiple_results:
        results = [results]
    values.update(zip(equation.outvars, results, strict=True))


@contextlib.contextmanager
def constants_evaluated(tensors: list[Any], *, computes: bool) -> Iterator[bool]:
    """Run the block with values in tensors that depend only on constants.

    With `computes` jax computes eagerly in the block, which fails if one of `tensors` varies over
    an axis of shard_map.

    The tensors stay the same objects, so that an operation can write to them. It yields whether any
    of them had a value.
    """
    exchanged = []
    for tensor in {id(x): x for x in tensors}.values():
        traced = tensor._elem
        value = constant_value(traced)
        if value is not None and value is not traced:
            name = "_array" if isinstance(tensor, View) else "_elem"  # a view caches its array
            exchanged.append((vars(tensor), name, traced, value))
            vars(tensor)[name] = value
    try:
        with jax.ensure_compile_time_eval() if computes else contextlib.nullcontext():
            yield bool(exchanged)
    finally:
        for attributes, name, traced, value in exchanged:
            if attributes[name] is value:
                attributes[name] = traced


# torchax defines these in Python, so they do not go through its dispatch.
_READS = {getattr(torch.Tensor, name): vars(Tensor)[name] for name in ("tolist", "numpy")}


def define(env: Any) -> None:
    """Define the methods that read values in an environment of torchax."""
    for function, method in _READS.items():
        env.override_op_definition(function, method)


def _dispatched(function: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        if function in self._env._ops:
            return self._env.dispatch(function, (), (self, *args), kwargs)
        return method(self, *args, **kwargs)

    return reads


for _function, _method in _READS.items():
    setattr(Tensor, _method.__name__, _dispatched(_function, _method))
