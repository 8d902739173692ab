"""Split the backward pass of a stage into two operations that may run at different times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from ..._support.types import PyTree
from ...tracing import Atom, run
from ._flat import FlatProgram, struct_of
from ._program import Argument, trace_backward, trace_forward


@dataclass(frozen=True)
class StagePart:
    """One operation of a stage, on flat values: equations with their inputs and outputs."""

    program: FlatProgram
    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    @classmethod
    def of(
        cls, program: FlatProgram, inputs: tuple[Var, ...], outputs: tuple[Atom, ...]
    ) -> "StagePart":
        """Return the part that computes `outputs`, with all side effects of the program."""
        equations = program.cut(outputs, with_effects=True).equations
        return cls(program, equations, inputs, outputs)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        inputs = dict(zip(self.inputs, values, strict=True)) | self.program.flat.constants
        return run(self.equations, self.outputs, inputs)


@dataclass(frozen=True)
class StageProgram:
    """The operations F, B, W and BW of one stage as pure functions; made by `split_stage`.

    F is `forward`, B `backward_input`, W `backward_weight`, BW `backward`. An equation of the
    backward pass is in B or in W; it is in both only if it changes just the layout or dtype of an
    array, or depends on weights or microbatch alone. All four can be traced under jit, scan, switch
    and shard_map, and take arrays of the types that `split_stage` got.

    Attributes:
      y: type of the stage's result, a tree of `jax.ShapeDtypeStruct`.
      stash: types of the arrays that F stores for the backward pass. They contain no leaf of
        weights or microbatch, and nothing that is cheap to compute from one of these alone.
      kept: types of the arrays that B stores for W in addition to the stash.

    Communication: only that of the stage's function.
    """

    y: PyTree
    stash: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    _weights: Argument = field(repr=False)
    _x: Argument = field(repr=False)
    _microbatch: Argument = field(repr=False)
    _y: Argument = field(repr=False)
    _loss: bool = field(repr=False)
    _forward: StagePart = field(repr=False)
    _backward: StagePart = field(repr=False)
    _backward_input: StagePart = field(repr=False)
    _backward_weight: StagePart = field(repr=False)

    def forward(
        self, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Run F: return the stage's result, and the stash."""
        args = (self._weights.flat(weights), self._x.flat(x), self._microbatch.flat(microbatch))
        values = self._forward([leaf for leaves in args for leaf in leaves])
        count = self._y.tree.num_leaves
        return self._y.tree.unflatten(values[:count]), tuple(values[count:])

    def backward(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run BW: return the cotangent of x and the gradient of the weights.

        In `dy`, a tree like y, None stands for zeros; for a loss stage it is the loss' cotangent.
        The results have None for leaves without cotangents, such as integers.
        """
        inputs = self._inputs(weights, microbatch, stash)
        values = self._backward([*inputs, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), self._weights.gradients(values[count:])

    def backward_input(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Run B: return the cotangent of x (None for leaves that have none), and `kept` for W.

        In `dy`, a tree like y, None stands for zeros; for a loss stage it is the loss' cotangent.
        """
        inputs = self._inputs(weights, microbatch, stash)
        values = self._backward_input([*inputs, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), tuple(values[count:])

    def backward_weight(
        self,
        weights: PyTree,
        microbatch: PyTree,
        stash: Sequence[jax.Array],
        kept: Sequence[jax.Array],
    ) -> PyTree:
        """Run W: return the gradient of the weights (None for leaves that have none)."""
        inputs = self._inputs(weights, microbatch, stash)
        _check_count("kept", kept, self.kept)
        return self._weights.gradients(self._backward_weight([*inputs, *kept]))

    def _inputs(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array]
    ) -> list[jax.Array]:
        _check_count("stash", stash, self.stash)
        return [*self._weights.flat(weights), *self._microbatch.flat(microbatch), *stash]

    def _cotangents(self, dy: PyTree) -> list[jax.Array]:
        if not self._loss:
            return self._y.cotangents(dy)
        of_loss = dy[0] if isinstance(dy, tuple) else dy
        rest = [None] * (self._y.tree.num_leaves - 1)
        return self._y.cotangents(self._y.tree.unflatten([of_loss, *rest]))


def split_stage(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
    microbatch: PyTree,
    *,
    loss: bool = False,
    remat: bool = False,
) -> StageProgram:
    """Split the backward pass of a stage into the gradient of its input, B, and the rest, W.

    The equations of the traced backward pass are divided: B computes the cotangent of `x`, and W
    everything that B has not computed, so that B and W together do the work of the whole. Calls,
    also checkpointed ones, are inlined. A `scan`, a `cond`, a `while_loop` or a kernel belongs to B
    as a whole if the cotangent of `x` needs any of its results. Zero-bubble schedules (Qi et al.
    2024, section 2) need this split.

    Args:
      fn: the function of the stage, `fn(weights, x, microbatch) -> y`, of trees. Leaves of integers
        and booleans have no cotangents.
      weights: a tree of arrays, or of types such as `jax.ShapeDtypeStruct`. Inside `shard_map`
        weights, `x` and `microbatch` must be arrays of the trace, whose types have the axes that
        they vary over: arguments of the operations may vary over fewer axes, not over more.
      x: the result of the previous stage, arrays or types.
      microbatch: the data that the stage reads (tokens, labels, masks), arrays or types. It is
        passed to every operation, is not in the stash, and gets no cotangent.
      loss: whether the stage returns a loss, or (loss, metrics); `dy` is then the cotangent of the
        loss.
      remat: whether the stash is only `x`; B then computes the rest again and keeps what W needs.

    Returns:
      The operations of the stage, and the types of the arrays that they exchange.

    Raises:
      ValueError: `loss=True` for a stage that returns no floating scalar or (scalar, metrics).
    """
    of_weights, of_x = Argument.of("weights", weights), Argument.of("x", x)
    of_data = Argument.of("microbatch", microbatch)
    front = trace_forward(fn, of_weights, of_x, of_data, loss=loss)
    back, stash = trace_backward(front, remat=remat)
    result, (inputs, outputs) = front.result, (back.flat.inputs, back.flat.outputs)
    dx, dweights = outputs[: of_x.num_chosen], outputs[of_x.num_chosen :]
    before_dy = len(inputs) - result.num_chosen
    of_input = StagePart.of(back, inputs, dx)
    done = {*inputs[before_dy:], *(v for e in of_input.equations for v in e.outvars)}
    equations, kept = back.cut(dweights, done.__contains__)
    return StageProgram(
        y=jax.tree.map(struct_of, result.tree.unflatten(result.types)),
        stash=tuple(struct_of(v.aval) for v in stash),
        kept=tuple(struct_of(v.aval) for v in kept),
        _weights=of_weights,
        _x=of_x,
        _microbatch=of_data,
        _y=result,
        _loss=loss,
        _forward=StagePart.of(front.program, front.program.flat.inputs, (*front.y, *stash)),
        _backward=StagePart.of(back, inputs, outputs),
        _backward_input=replace(of_input, outputs=(*dx, *kept)),
        _backward_weight=StagePart(back, equations, (*inputs[:before_dy], *kept), dweights),
    )


def _check_count(name: str, arrays: Sequence[Any], types: Sequence[Any]) -> None:
    """Raise `ValueError` for a number of arrays that differs from that of their types."""
    if len(arrays) != len(types):
        raise ValueError(
            f"`{name}` must hold the {len(types)} arrays of `StageProgram.{name}`, got "
            f"{len(arrays)}."
        )
