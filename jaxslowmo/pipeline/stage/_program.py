"""Trace a stage of a model to two flat programs, its forward and its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from ..._support.types import PyTree
from ...mesh import match_varying
from ...tracing import Atom, flattened, run
from ._flat import FlatProgram, Origin, type_of
from ._loops import weights_first


@dataclass(frozen=True)
class Argument:
    """The structure and types of an argument with which a stage was traced."""

    name: str
    tree: Any  # the structure of the argument
    types: tuple[Any, ...]
    chosen: tuple[bool, ...]  # leaves that have cotangents

    @classmethod
    def of(cls, name: str, value: PyTree) -> "Argument":
        """Return the argument `name` for arrays or types; floating leaves have cotangents."""
        leaves, tree = jax.tree.flatten(value)
        types = tuple(map(type_of, leaves))
        return cls(name, tree, types, tuple(map(is_differentiable, types)))

    @property
    def num_chosen(self) -> int:
        """The number of leaves that have cotangents."""
        return sum(self.chosen)

    def flat(self, value: PyTree) -> list[Any]:
        """Return the leaves of `value`; raise `ValueError` unless it is like the traced one."""
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            raise ValueError(f"`{self.name}` must be the tree {self.tree}, as traced, got {tree}.")
        pairs = enumerate(zip(self.types, leaves, strict=True))
        return [self._as_traced(i, aval, leaf) for i, (aval, leaf) in pairs]

    def cotangents(self, value: PyTree) -> list[Any]:
        """Return cotangents of the chosen leaves from a tree, in which None stands for zeros."""
        try:
            leaves = self.tree.flatten_up_to(value)
        except ValueError as error:
            raise ValueError(
                f"`d{self.name}` must be a tree like `{self.name}`, {self.tree}: {error}"
            ) from None
        items = enumerate(zip(self.types, self.chosen, leaves, strict=True))
        return [
            self._as_traced(i, aval, jnp.zeros(aval.shape, aval.dtype) if x is None else x)
            for i, (aval, chosen, x) in items
            if chosen
        ]

    def select(self, leaves: Sequence[Any]) -> list[Any]:
        """Return those of all `leaves` that are chosen."""
        return [leaf for leaf, chosen in zip(leaves, self.chosen, strict=True) if chosen]

    def merge(self, leaves: Sequence[Any], chosen: Sequence[Any]) -> PyTree:
        """Return the tree of `leaves`, with the chosen ones replaced by `chosen`."""
        instead = iter(chosen)
        pairs = zip(leaves, self.chosen, strict=True)
        return self.tree.unflatten([next(instead) if take else leaf for leaf, take in pairs])

    def gradients(self, values: Sequence[Any]) -> PyTree:
        """Return the tree of cotangents: `values` for the chosen leaves, None for the others."""
        return self.merge([None] * len(self.chosen), values)

    def _as_traced(self, i: int, aval: Any, x: Any) -> Any:
        """Return leaf `i` with its traced type; raise `ValueError` if it has another type."""
        x = jnp.asarray(x, aval.dtype) if isinstance(x, int | float | complex) else x
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", type(x).__name__)
        if shape != aval.shape or dtype != aval.dtype:
            got = dtype if shape is None else f"{dtype}{list(shape)}"
            expected = aval.str_short(short_dtypes=False)
            raise ValueError(
                f"`{self.name}`: leaf {i} must be {expected}, as the stage was traced, got {got}."
            )
        return match_varying(x, aval)


def is_differentiable(x: Any) -> bool:
    """Return whether an array or type has cotangents: floating and complex ones do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclass(frozen=True)
class Forward:
    """The traced forward pass, with the residuals that `jax.vjp` keeps as outputs."""

    program: FlatProgram
    weights: tuple[Var, ...]
    x: tuple[Var, ...]
    microbatch: tuple[Var, ...]
    y: tuple[Atom, ...]
    residuals: tuple[Atom, ...]
    pull_back: Any  # tree structure of the function that `jax.vjp` returns
    result: Argument  # the stage's y


def trace_forward(
    fn: Callable[..., PyTree], weights: Argument, x: Argument, microbatch: Argument, *, loss: bool
) -> Forward:
    """Trace `fn` and its residuals; with `loss`, only the first leaf of y has a cotangent."""
    traced_y: dict[str, Any] = {}

    def outputs(*flat: Any) -> list[Any]:
        w, into, data = _divide(flat, weights, x)

        def of_floats(of_w: list[Any], of_x: list[Any]) -> tuple[list[Any], list[Any]]:
            y = fn(weights.merge(w, of_w), x.merge(into, of_x), microbatch.tree.unflatten(data))
            leaves, traced_y["tree"] = jax.tree.flatten(y)
            leaves = list(map(jnp.asarray, leaves))
            if loss:
                _check_loss(y)
            traced_y["seeded"] = [
                is_differentiable(y) and not (loss and i) for i, y in enumerate(leaves)
            ]
            sides = list(zip(leaves, traced_y["seeded"], strict=True))
            return [y for y, seeded in sides if seeded], [y for y, seeded in sides if not seeded]

        seeded, pull_back, others = jax.vjp(
            of_floats, weights.select(w), x.select(into), has_aux=True
        )
        residuals, traced_y["pull_back"] = jax.tree.flatten(pull_back)
        in_order = {True: iter(seeded), False: iter(others)}
        return [*(next(in_order[s]) for s in traced_y["seeded"]), *residuals]

    flat = flattened(outputs, [*weights.types, *x.types, *microbatch.types])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "microbatch")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types) + len(x.types)], "x")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types)], "weights")
    program = weights_first(FlatProgram(flat, origins))
    of_weights, of_x, of_microbatch = _divide(program.flat.inputs, weights, x)
    count = len(traced_y["seeded"])
    y, residuals = program.flat.outputs[:count], program.flat.outputs[count:]
    types = tuple(v.aval for v in y)
    result = Argument("y", traced_y["tree"], types, tuple(traced_y["seeded"]))
    return Forward(
        program, *(of_weights, of_x, of_microbatch), *(y, residuals, traced_y["pull_back"], result)
    )


def trace_backward(forward: Forward, *, remat: bool) -> tuple[FlatProgram, tuple[Var, ...]]:
    """Trace the backward pass, and choose the stash that it needs of the forward pass.

    With `remat` the stash is x. Otherwise it is the residuals, except those that can be computed
    cheaply from weights, microbatch or a smaller array, which is then stashed instead.

    Returns:
      The program, whose inputs are weights, microbatch, stash and cotangents of y, and whose
      outputs are the cotangents of x and then the gradients of the weights; and the stash, as
      variables of the forward pass.
    """
    at_hand = {*forward.weights, *forward.microbatch}
    if remat:
        stash = forward.x
        again = forward.program.cut(forward.residuals).equations
    else:
        again, stash = forward.program.cut(forward.residuals, lambda v: v not in at_hand)
    inputs_before_dy = (*forward.weights, *forward.microbatch, *stash)

    def outputs(*flat: Any) -> list[Any]:
        values = dict(zip(inputs_before_dy, flat, strict=False)) | forward.program.flat.constants
        residuals = run(again, forward.residuals, values)
        pull_back = jax.tree.unflatten(forward.pull_back, residuals)
        dweights, dx = pull_back(list(flat[len(inputs_before_dy) :]))
        return [*dx, *dweights]

    seeds = forward.result.select(forward.result.types)
    flat = flattened(outputs, [*(v.aval for v in inputs_before_dy), *seeds])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "dy")
    pairs = zip(flat.inputs, inputs_before_dy, strict=False)
    origins |= {v: forward.program.origins.get(source, "stash") for v, source in pairs}
    return FlatProgram(flat, origins), stash


def _divide(flat: Sequence[Any], *first: Argument) -> list[tuple[Any, ...]]:
    """Return `flat` divided into the leaves of the `first` arguments, and the remaining ones."""
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
