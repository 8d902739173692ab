"""The forward pass of a stage, and its backward pass in two parts that may run far apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._support.types import PyTree
from ._flat import struct_of
from ._program import StagePart, WholeStage, check_count, traced


@dataclass(frozen=True)
class StageProgram(WholeStage):
    """What `split_stage` makes: the operations F, B, W and BW of one stage as pure functions.

    F is `forward`, B `backward_input`, W `backward_weight`, BW `backward`. An equation of the
    backward pass is in B or in W; in both only where it merely lays an array out or depends on
    weights or microbatch alone. All four can be traced under jit, scan, switch and shard_map, and
    take arrays of the types that `split_stage` was given.

    Attributes:
      y: type of the stage's result, a tree of `jax.ShapeDtypeStruct`.
      stash: types of what F leaves for the backward pass: no leaf of weights or microbatch, nothing
        that one of them alone determines by cheap means.
      kept: types of what B leaves for W beside the stash.
      reads: per leaf of the microbatch, whether any operation looks at it.

    Communication: that of the stage's function alone.
    """

    _backward_input: StagePart = field(repr=False)
    _backward_weight: StagePart = field(repr=False)

    def backward_input(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """B: the cotangent of x (None for leaves that have none), and what W needs of it.

        In `dy`, a tree like y, None stands for zeros; of a loss stage it is the loss' cotangent.
        """
        known = self._known(weights, microbatch, stash)
        values = self._backward_input([*known, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), tuple(values[count:])

    def backward_weight(
        self,
        weights: PyTree,
        microbatch: PyTree,
        stash: Sequence[jax.Array],
        kept: Sequence[jax.Array],
    ) -> PyTree:
        """W: the gradient of the weights (None for leaves that have none)."""
        known = self._known(weights, microbatch, stash)
        check_count("kept", kept, self.kept)
        return self._weights.gradients(self._backward_weight([*known, *kept]))


def split_stage(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    weights: PyTree,
    x: PyTree,
    microbatch: PyTree,
    *,
    loss: bool = False,
    remat: bool = False,
) -> StageProgram:
    """Split the backward pass of a stage into what its input needs, B, and the rest, W.

    The equations of the traced backward pass are divided, exactly: B computes the cotangent of `x`,
    W what B has not computed, so that B and W together do the work of the whole. Calls,
    checkpointed ones too, are opened, and `lax.scan` becomes a loop in each part; a `cond`, a
    `while_loop`, a scan inside of a scan or a kernel belongs to B as a whole if the cotangent of
    `x` needs any of it. Zero-bubble schedules (Qi et al. 2024, section 2) rest on this split.

    Args:
      fn: the stage, `fn(weights, x, microbatch) -> y`, of trees. Leaves of integers and booleans
        pass along without cotangents.
      weights: arrays, or types such as `jax.ShapeDtypeStruct`; likewise `x` and `microbatch`.
        Inside `shard_map`, arrays of the trace: their types tell over which axes they vary, and
        what is passed to the program may vary over fewer, not over more.
      x: what the stage before gives.
      microbatch: what the stage reads of the data (tokens, labels, masks). It is passed to every
        operation again, the stash holds nothing of it, and it gets no cotangent.
      loss: the stage gives a loss, or (loss, metrics); `dy` is then the cotangent of the loss.
      remat: the stash is `x`; B computes the rest again and hands on what W needs.

    Returns:
      The operations of the stage, and the types of what lies between them.

    Raises:
      ValueError: `loss=True` for a stage whose result is no floating scalar or (scalar, metrics).
    """
    whole, back = traced(fn, weights, x, microbatch, loss=loss, remat=remat, splits=True)
    program = back.program
    of_input = program.and_effects(program.cut(back.dx).equations)
    done = {*back.cotangents, *(v for equation in of_input for v in equation.outvars)}
    of_weights, kept = program.cut(back.dweights, done.__contains__)
    known = back.inputs[: len(back.inputs) - len(back.cotangents)]
    fields: dict[str, Any] = vars(whole) | {"kept": tuple(struct_of(v.aval) for v in kept)}
    return StageProgram(
        **fields,
        _backward_input=StagePart(program, of_input, back.inputs, (*back.dx, *kept)),
        _backward_weight=StagePart(program, of_weights, (*known, *kept), back.dweights),
    )
