"""A stage of a model as two programs, its forward and its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from ..._support.types import PyTree
from ...mesh import cast_varying, varying_axes
from ...tracing import Atom, flattened, run
from ._flat import FlatProgram, Origin, is_loop, struct_of, type_of, used_by
from ._loops import wanted_first, weights_first


@dataclass(frozen=True)
class Argument:
    """A tree of arrays as it was when the stage was traced."""

    name: str
    tree: Any  # its structure
    types: tuple[Any, ...]
    chosen: tuple[bool, ...]  # leaves that have cotangents

    @classmethod
    def of(cls, name: str, value: PyTree) -> "Argument":
        """The argument `name`, of arrays or their types; floating leaves have cotangents."""
        leaves, tree = jax.tree.flatten(value)
        types = tuple(map(type_of, leaves))
        return cls(name, tree, types, tuple(map(is_differentiable, types)))

    @property
    def num_chosen(self) -> int:
        """How many leaves have cotangents."""
        return sum(self.chosen)

    def flat(self, value: PyTree) -> list[Any]:
        """Leaves of `value`, which must be what was traced."""
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            raise ValueError(f"`{self.name}` must be the tree {self.tree}, as traced, got {tree}.")
        pairs = enumerate(zip(self.types, leaves, strict=True))
        return [self._as_traced(i, wanted, leaf) for i, (wanted, leaf) in pairs]

    def cotangents(self, value: PyTree) -> list[Any]:
        """Cotangents of the chosen leaves, from a tree like this; None stands for zeros."""
        try:
            leaves = self.tree.flatten_up_to(value)
        except ValueError as error:
            raise ValueError(
                f"`d{self.name}` must be a tree like `{self.name}`, {self.tree}: {error}"
            ) from None
        given = enumerate(zip(self.types, self.chosen, leaves, strict=True))
        return [
            self._as_traced(i, wanted, jnp.zeros(wanted.shape, wanted.dtype) if x is None else x)
            for i, (wanted, chosen, x) in given
            if chosen
        ]

    def select(self, leaves: Sequence[Any]) -> list[Any]:
        """The chosen ones of all `leaves`."""
        return [leaf for leaf, chosen in zip(leaves, self.chosen, strict=True) if chosen]

    def merge(self, leaves: Sequence[Any], chosen: Sequence[Any]) -> PyTree:
        """The tree of `leaves`, the chosen ones taken from `chosen`."""
        instead = iter(chosen)
        pairs = zip(leaves, self.chosen, strict=True)
        return self.tree.unflatten([next(instead) if take else leaf for leaf, take in pairs])

    def gradients(self, values: Sequence[Any]) -> PyTree:
        """The tree of cotangents: `values` of the chosen leaves, None for the others."""
        return self.merge([None] * len(self.chosen), values)

    def _as_traced(self, i: int, wanted: Any, x: Any) -> Any:
        """Leaf `i` with the type it was traced with, if it can have that without arithmetic."""
        x = jnp.asarray(x, wanted.dtype) if isinstance(x, int | float | complex) else x
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", type(x).__name__)
        if shape != wanted.shape or dtype != wanted.dtype:
            got = dtype if shape is None else f"{dtype}{list(shape)}"
            expected = wanted.str_short(short_dtypes=False)
            raise ValueError(
                f"`{self.name}`: leaf {i} must be {expected}, as the stage was traced, got {got}."
            )
        varying = varying_axes(x)
        if more := varying - varying_axes(wanted):
            axes = ", ".join(map(repr, sorted(more)))
            raise ValueError(
                f"`{self.name}`: leaf {i} varies over {axes}, but did not when "
                "the stage was traced: give `split_stage` arrays that vary over all axes that "
                "those of the calls do (`jax.lax.pcast(x, axes, to='varying')`)."
            )
        return cast_varying(x, varying_axes(wanted) - varying)


def is_differentiable(x: Any) -> bool:
    """Whether an array or type has cotangents: floating and complex ones do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclass(frozen=True)
class Forward:
    """The traced forward pass, up to the values that `jax.vjp` would keep."""

    program: FlatProgram
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

    program: FlatProgram
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

    flat = flattened(outputs, [*weights.types, *x.types, *microbatch.types])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "microbatch")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types) + len(x.types)], "x")
    origins |= dict.fromkeys(flat.inputs[: len(weights.types)], "weights")
    program = FlatProgram(flat, origins)
    if any(map(is_loop, flat.equations)):
        program = weights_first(program)
    of_weights, of_x, of_microbatch = _divide(program.flat.inputs, weights, x)
    count = len(found["seeded"])
    y, residuals = program.flat.outputs[:count], program.flat.outputs[count:]
    types = tuple(v.aval for v in y)
    result = Argument("y", found["tree"], types, tuple(found["seeded"]))
    return Forward(
        program, *(of_weights, of_x, of_microbatch), *(y, residuals, found["pull_back"], result)
    )


def trace_backward(forward: Forward, x: Argument, *, remat: bool, splits: bool) -> Backward:
    """Trace the backward pass from the stash that the forward pass is to leave.

    With `splits` every loop becomes two where the cotangent of x needs some of its results alone.
    With `remat` the stash is x; else the residuals, each replaced by what it is another form of,
    without those that weights or microbatch determine: they are computed from these.
    """
    at_hand = {*forward.weights, *forward.microbatch}
    if remat:
        stash = forward.x
        again = forward.program.cut(forward.residuals).equations
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
    flat = flattened(outputs, [*(v.aval for v in known), *seeds])
    origins: dict[Var, Origin] = dict.fromkeys(flat.inputs, "dy")
    pairs = zip(flat.inputs, known, strict=False)
    origins |= {v: forward.program.origins.get(there, "stash") for v, there in pairs}
    whole = FlatProgram(flat, origins)
    program = whole
    if splits and any(map(is_loop, flat.equations)):
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


@dataclass(frozen=True)
class StagePart:
    """Equations with their inputs and outputs: one operation of a stage on flat values."""

    program: FlatProgram
    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(self.inputs, values, strict=True)) | self.program.flat.constants
        return run(self.equations, self.outputs, known)


@dataclass(frozen=True)
class WholeStage:
    """The operations F and BW of one stage as pure functions.

    Both can be traced under jit, scan, switch and shard_map, and take arrays of the types that the
    stage was made for.

    Attributes:
      y: type of the stage's result, a tree of `jax.ShapeDtypeStruct`.
      stash: types of what F leaves for the backward pass: no leaf of weights or microbatch, nothing
        that one of them alone determines by cheap means.
      kept: types of what B leaves for W beside the stash; () where these are one.
      reads: per leaf of the microbatch, whether any operation looks at it.
    """

    y: PyTree
    stash: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    reads: tuple[bool, ...]
    _weights: Argument = field(repr=False)
    _x: Argument = field(repr=False)
    _microbatch: Argument = field(repr=False)
    _y: Argument = field(repr=False)
    _loss: bool = field(repr=False)
    _forward: StagePart = field(repr=False)
    _backward: StagePart = field(repr=False)

    def forward(
        self, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """F: the stage's result, and the stash."""
        given = (self._weights.flat(weights), self._x.flat(x), self._microbatch.flat(microbatch))
        values = self._forward([leaf for leaves in given for leaf in leaves])
        count = self._y.tree.num_leaves
        return self._y.tree.unflatten(values[:count]), tuple(values[count:])

    def backward(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """BW: the cotangent of x and the gradient of the weights at once.

        In `dy`, a tree like y, None stands for zeros; of a loss stage it is the loss' cotangent.
        Leaves that have no cotangent, such as integers, have None.
        """
        known = self._known(weights, microbatch, stash)
        values = self._backward([*known, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), self._weights.gradients(values[count:])

    def _known(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array]
    ) -> list[jax.Array]:
        check_count("stash", stash, self.stash)
        return [*self._weights.flat(weights), *self._microbatch.flat(microbatch), *stash]

    def _cotangents(self, dy: PyTree) -> list[jax.Array]:
        if not self._loss:
            return self._y.cotangents(dy)
        of_loss = dy[0] if isinstance(dy, tuple) else dy
        rest = [None] * (self._y.tree.num_leaves - 1)
        return self._y.cotangents(self._y.tree.unflatten([of_loss, *rest]))


def whole_stage(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
    microbatch: PyTree,
    *,
    loss: bool = False,
    remat: bool = False,
) -> WholeStage:
    """Make the forward and the backward pass of a stage; see `split_stage` for the arguments."""
    return traced(fn, weights, x, microbatch, loss=loss, remat=remat, splits=False)[0]


def traced(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
    microbatch: PyTree,
    *,
    loss: bool,
    remat: bool,
    splits: bool,
) -> tuple[WholeStage, Backward]:
    """Return a stage and its traced backward pass; see `split_stage` for the arguments.

    Raises:
      ValueError: `loss=True` for a stage whose result is no floating scalar or (scalar, metrics).
    """
    of_weights, of_x = Argument.of("weights", weights), Argument.of("x", x)
    of_data = Argument.of("microbatch", microbatch)
    there = trace_forward(fn, of_weights, of_x, of_data, loss=loss)
    back = trace_backward(there, of_x, remat=remat, splits=splits)
    outputs, gradients = (*there.y, *back.stash), (*back.dx, *back.dweights)
    forward = there.program.and_effects(there.program.cut(outputs).equations)
    both = back.program.and_effects(back.program.cut(gradients).equations)
    read = used_by(forward, outputs) | used_by(both, gradients)
    again = back.inputs[len(there.weights) :][: len(there.microbatch)]
    inputs = *there.weights, *there.x, *there.microbatch
    stage = WholeStage(
        y=jax.tree.map(struct_of, there.result.tree.unflatten(there.result.types)),
        stash=tuple(struct_of(v.aval) for v in back.stash),
        kept=(),
        reads=tuple(a in read or b in read for a, b in zip(there.microbatch, again, strict=True)),
        _weights=of_weights,
        _x=of_x,
        _microbatch=of_data,
        _y=there.result,
        _loss=loss,
        _forward=StagePart(there.program, forward, inputs, outputs),
        _backward=StagePart(back.program, both, back.inputs, gradients),
    )
    return stage, back


def check_count(name: str, arrays: Sequence[Any], types: Sequence[Any]) -> None:
    """Raise `ValueError` for another number of arrays than an operation takes."""
    if len(arrays) != len(types):
        raise ValueError(
            f"`{name}` must hold the {len(types)} arrays of `StageProgram.{name}`, got "
            f"{len(arrays)}."
        )
