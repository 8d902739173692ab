"""Split the backward pass of a stage into two operations that may run at different times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._support.types import PyTree
from ._flat import struct_of
from ._program import StagePart, WholeStage, check_count, traced


@dataclass(frozen=True)
class StageProgram(WholeStage):
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

    _backward_input: StagePart = field(repr=False)
    _backward_weight: StagePart = field(repr=False)

    def backward_input(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Run B: return the cotangent of x (None for leaves that have none), and `kept` for W.

        In `dy`, a tree like y, None stands for zeros; for a loss stage it is the loss' cotangent.
        """
        inputs = self._backward_inputs(weights, microbatch, stash)
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
        inputs = self._backward_inputs(weights, microbatch, stash)
        check_count("kept", kept, self.kept)
        return self._weights.gradients(self._backward_weight([*inputs, *kept]))


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
    also checkpointed ones, are inlined, and a `lax.scan` becomes a loop in each part. A `cond`, a
    `while_loop`, a scan inside of a scan or a kernel belongs to B as a whole if the cotangent of
    `x` needs any of its results. Zero-bubble schedules (Qi et al. 2024, section 2) need this split.

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
    whole, back = traced(fn, weights, x, microbatch, loss=loss, remat=remat, splits=True)
    program = back.program
    of_input = program.and_effects(program.cut(back.dx).equations)
    done = {*back.cotangents, *(v for equation in of_input for v in equation.outvars)}
    of_weights, kept = program.cut(back.dweights, done.__contains__)
    inputs = back.inputs[: len(back.inputs) - len(back.cotangents)]
    fields: dict[str, Any] = vars(whole) | {"kept": tuple(struct_of(v.aval) for v in kept)}
    return StageProgram(
        **fields,
        _backward_input=StagePart(program, of_input, back.inputs, (*back.dx, *kept)),
        _backward_weight=StagePart(program, of_weights, (*inputs, *kept), back.dweights),
    )
