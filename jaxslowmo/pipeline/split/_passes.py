"""Trace a stage's forward and backward pass, and find out what must lie between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from ..._typing import PyTree
from ._arguments import Argument, is_differentiable
from ._jaxpr import Atom, run, trace
from ._loops import wanted_first, weights_first
from ._partition import Origin, Program


@dataclass(frozen=True)
class Forward:
    """The traced forward pass, up to the values that `jax.vjp` would keep."""

    program: Program
    weights: tuple[Var, ...]
    x: tuple[Var, ...]
    microbatch: tuple[Var, ...]
    y: tuple[Atom, ...]
    residuals: tuple[Atom, ...]
    pull_back: Any  # structure of the function that `jax.vjp` gives
    result: Argument  # the stage's y


@dataclass(frozen=True)
class Backward:
    """The traced backward pass, from weights, microbatch, stash and cotangents."""

    program: Program
    stash: tuple[Var, ...]  # of the forward pass
    inputs: tuple[Var, ...]  # weights, microbatch, stash, cotangents of y
    cotangents: tuple[Var, ...]  # the last of them
    dx: tuple[Atom, ...]
    dweights: tuple[Atom, ...]


def trace_forward(
    fn: Callable[..., PyTree], weights: Argument, x: Argument, microbatch: Argument, *, loss: bool
) -> Forward:
    """Trace `fn` and its residuals. With `loss`, only its result's first leaf has a cotangent."""
    found: dict[str, Any] = {}

    def outputs(*flat: Any) -> list[Any]:
        w, into, data = _divide(flat, weights, x)

        def of_floats(of_w: list[Any], of_x: list[Any]) -> tuple[list[Any], list[Any]]:
            y = fn(weights.merge(w, of_w), x.merge(into, of_x), microbatch.tree.unflatten(data))
            leaves, found["tree"] = jax.tree.flatten(y)
            leaves = list(map(jnp.asarray, leaves))
            if loss:
                _check_loss(y)
            found["seeded"] = [
                is_differentiable(y) and not (loss and i) for i, y in enumerate(leaves)
            ]
            sides = list(zip(leaves, found["seeded"], strict=True))
            return [y for y, seeded in sides if seeded], [y for y, seeded in sides if not seeded]

        seeded, pull_back, others = jax.vjp(
            of_floats, weights.select(w), x.select(into), has_aux=True
        )
        residuals, found["pull_back"] = jax.tree.flatten(pull_back)
        in_order = {True: iter(seeded), False: iter(others)}
        return [*(next(in_order[s]) for s in found["seeded"]), *residuals]

    flat = trace(outputs, [*weights.types, *x.types, *microbatch.types])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "microbatch")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types) + len(x.types)], "x")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types)], "weights")
    program = weights_first(Program(flat, origins))
    of_weights, of_x, of_microbatch = _divide(program.flat.inputs, weights, x)
    count = len(found["seeded"])
    y, residuals = program.flat.outputs[:count], program.flat.outputs[count:]
    types = tuple(v.aval for v in y)
    result = Argument("y", found["tree"], types, tuple(found["seeded"]))
    return Forward(
        program,
        *(of_weights, of_x, of_microbatch),
        *(y, residuals, found["pull_back"], result),
    )


def trace_backward(forward: Forward, x: Argument, *, remat: bool) -> Backward:
    """Trace the backward pass from the stash that the forward pass is to leave.

    With `remat` that is x; else the residuals, each replaced by what it is another form of, without
    those that weights or microbatch determine: they are computed from these.
    """
    at_hand = {*forward.weights, *forward.microbatch}
    if remat:
        stash = forward.x
        again = forward.program.cut(forward.residuals, lambda v: False).equations
    else:
        again, stash = forward.program.cut(forward.residuals, lambda v: v not in at_hand)
    known = (*forward.weights, *forward.microbatch, *stash)

    def outputs(*flat: Any) -> list[Any]:
        values = dict(zip(known, flat, strict=False)) | forward.program.flat.constants
        residuals = run(again, forward.residuals, values)
        pull_back = jax.tree.unflatten(forward.pull_back, residuals)
        dweights, dx = pull_back(list(flat[len(known) :]))
        return [*dx, *dweights]

    seeds = forward.result.select(forward.result.types)
    flat = trace(outputs, [*(v.aval for v in known), *seeds])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "dy")
    pairs = zip(flat.inputs, known, strict=False)
    origins |= {v: forward.program.origins.get(there, "stash") for v, there in pairs}
    whole = Program(flat, origins)
    program = wanted_first(whole, flat.outputs[: x.num_chosen])
    inputs, results = program.flat.inputs, program.flat.outputs
    dx, dweights = results[: x.num_chosen], results[x.num_chosen :]
    return Backward(program, stash, inputs, inputs[len(known) :], dx, dweights)


def _divide(flat: Sequence[Any], *first: Argument) -> list[tuple[Any, ...]]:
    """`flat` divided into the leaves of the `first` arguments and of the one after them."""
    parts, start = [], 0
    for argument in first:
        parts.append(tuple(flat[start : start + len(argument.types)]))
        start += len(argument.types)
    return [*parts, tuple(flat[start:])]


def _check_loss(y: PyTree) -> None:
    loss: Any = y[0] if isinstance(y, tuple) and y else y
    if (
        jax.tree.structure(loss).num_leaves != 1
        or jnp.shape(loss) != ()
        or not is_differentiable(loss)
    ):
        raise ValueError(
            "`loss=True` is for a stage that gives a loss, a floating scalar, or (loss, metrics), "
            f"got {jax.tree.map(jax.typeof, y)}."
        )
