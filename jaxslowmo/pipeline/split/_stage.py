"""The forward pass of a stage, and its backward pass in two parts that may run far apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from ..._typing import PyTree
from ._arguments import Argument
from ._jaxpr import Atom, run, struct_of, used_by
from ._partition import Program
from ._passes import trace_backward, trace_forward


@dataclass(frozen=True)
class _Part:
    """Equations with their inputs and outputs: one operation of a stage on flat values."""

    program: Program
    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(self.inputs, values, strict=True)) | self.program.flat.constants
        return run(self.equations, self.outputs, known)


@dataclass(frozen=True)
class StageProgram:
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

    y: PyTree
    stash: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    reads: tuple[bool, ...]
    _weights: Argument = field(repr=False)
    _x: Argument = field(repr=False)
    _microbatch: Argument = field(repr=False)
    _y: Argument = field(repr=False)
    _loss: bool = field(repr=False)
    _forward: _Part = field(repr=False)
    _backward_input: _Part = field(repr=False)
    _backward_weight: _Part = field(repr=False)
    _backward: _Part = field(repr=False)

    def forward(
        self, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """F: the stage's result, and the stash."""
        given = (self._weights.flat(weights), self._x.flat(x), self._microbatch.flat(microbatch))
        values = self._forward([leaf for leaves in given for leaf in leaves])
        count = self._y.tree.num_leaves
        return self._y.tree.unflatten(values[:count]), tuple(values[count:])

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
        _check_count("kept", kept, self.kept)
        return self._weights.gradients(self._backward_weight([*known, *kept]))

    def backward(
        self, weights: PyTree, microbatch: PyTree, stash: Sequence[jax.Array], dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """BW: the cotangent of x and the gradient of the weights at once."""
        known = self._known(weights, microbatch, stash)
        values = self._backward([*known, *self._cotangents(dy)])
        count = self._x.num_chosen
        return self._x.gradients(values[:count]), self._weights.gradients(values[count:])

    def _known(
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
    ours, before = Argument.of("weights", weights), Argument.of("x", x)
    data = Argument.of("microbatch", microbatch)
    there = trace_forward(fn, ours, before, data, loss=loss)
    back = trace_backward(there, before, remat=remat)

    def nowhere(v: Var) -> bool:
        return False

    program = there.program
    outputs = (*there.y, *back.stash)
    forward = program.and_effects(program.cut(outputs, nowhere).equations)
    program = back.program
    of_input = program.and_effects(program.cut(back.dx, nowhere).equations)
    done = {*back.cotangents, *(v for equation in of_input for v in equation.outvars)}
    of_weights, kept = program.cut(back.dweights, done.__contains__)
    both = program.and_effects(program.cut((*back.dx, *back.dweights), nowhere).equations)
    known = back.inputs[: len(back.inputs) - len(back.cotangents)]
    again = known[len(there.weights) :][: len(there.microbatch)]
    read = used_by(forward, outputs) | used_by(both, (*back.dx, *back.dweights))
    reads = tuple(a in read or b in read for a, b in zip(there.microbatch, again, strict=True))
    return StageProgram(
        y=jax.tree.map(struct_of, there.result.tree.unflatten(there.result.types)),
        stash=tuple(struct_of(v.aval) for v in back.stash),
        kept=tuple(struct_of(v.aval) for v in kept),
        reads=reads,
        _weights=ours,
        _x=before,
        _microbatch=data,
        _y=there.result,
        _loss=loss,
        _forward=_Part(
            there.program, forward, (*there.weights, *there.x, *there.microbatch), outputs
        ),
        _backward_input=_Part(program, of_input, back.inputs, (*back.dx, *kept)),
        _backward_weight=_Part(program, of_weights, (*known, *kept), back.dweights),
        _backward=_Part(program, both, back.inputs, (*back.dx, *back.dweights)),
    )


def _check_count(name: str, given: Sequence[Any], types: Sequence[Any]) -> None:
    if len(given) != len(types):
        raise ValueError(
            f"`{name}` must hold the {len(types)} arrays of `StageProgram.{name}`, got "
            f"{len(given)}."
        )
