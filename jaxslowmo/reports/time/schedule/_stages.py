"""The stages of a pipeline on types alone: what they compute, leave and send."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...._support.types import PyTree
from ....pipeline import LayeredModel, Pipelined, Schedule, StageProgram, split_stage
from ....pipeline.model import Keyed, WithState


@dataclass(frozen=True)
class Stage:
    """A stage of the model with the types of what it is given.

    Attributes:
      program: its operations.
      weights: parameters of its layers.
      x: what the stage before gives; None of the first one.
      microbatch: what one device has of a microbatch.
    """

    program: StageProgram
    weights: PyTree
    x: PyTree
    microbatch: PyTree

    @property
    def cotangent(self) -> PyTree:
        """Type of the cotangent of its result; None for leaves that have none."""
        return jax.tree.map(lambda y: y if is_floating(y) else None, self.program.y)


@dataclass(frozen=True)
class Parts:
    """What a pipeline was made of.

    Attributes:
      model: the layers.
      schedule: which stage computes what when.
      blocks: [start, end) of the layers of each stage of the model.
      types: of the parameters, one tree per layer.
      states: types of the model state, one tree per layer; None for models without.
      num_shares: devices of one stage that share the batch of a replica.
      remat: whether forward passes are computed again.
    """

    model: LayeredModel
    schedule: Schedule
    blocks: Sequence[tuple[int, int]]
    types: Sequence[PyTree]
    states: Sequence[PyTree] | None
    num_shares: int
    remat: bool


def parts_of(pipe: Pipelined) -> Parts:
    """What `pipe` was made of."""
    states = pipe.state_layout
    return Parts(
        model=pipe.model,
        schedule=pipe.schedule,
        blocks=pipe.layout.blocks,
        types=pipe.layout.unstack(pipe.layout.types),
        states=None if states is None else states.unstack(states.types),
        num_shares=math.prod(pipe.mesh.shape[axis] for axis in pipe.data_axes),
        remat=pipe.remat,
    )


def stages_of(parts: Parts, batch: PyTree) -> list[Stage]:
    """The stages of a model, for a batch as the pipeline is given it.

    Raises:
      ValueError: a batch whose leading dimension the microbatches of all shares do not divide.
    """
    model, last = parts.model, len(parts.blocks) - 1
    microbatch = _microbatch(parts, batch)
    if model.takes_key:
        key = jax.eval_shape(lambda: jax.random.key(0))
        microbatch = Keyed(microbatch, key, jax.ShapeDtypeStruct((), jnp.int32))
    stages: list[Stage] = []
    x: PyTree = None
    for k, (start, end) in enumerate(parts.blocks):
        weights = tuple(parts.types[start:end])
        # Layers are written out: of a loop the compiler counts one turn.
        fn = model.stage(start, end)
        given = x if parts.states is None else WithState(x, list(parts.states[start:end]))
        program = split_stage(fn, weights, given, microbatch, loss=k == last, remat=parts.remat)
        stages.append(Stage(program, weights, given, microbatch))
        x = activations(program.y)
    return stages


def activations(x: PyTree) -> PyTree:
    """Return what travels between stages, without the model state that stays on a device."""
    return x.x if isinstance(x, WithState) else x


def num_bytes(types: PyTree) -> int:
    """Of all arrays of a tree of types."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))


def is_floating(x: Any) -> bool:
    """Whether an array of this type has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _microbatch(parts: Parts, batch: PyTree) -> PyTree:
    """Types of one device's part of one microbatch."""
    microbatches = parts.schedule.num_microbatches
    count = microbatches * parts.num_shares

    examples = max((jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=0)

    def part(x: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(jnp.shape(x))
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(x))
        if examples and (not shape or shape[0] == 1 < examples):  # shared by all of them
            return jax.ShapeDtypeStruct(shape, dtype)
        if not shape or shape[0] % count or not shape[0]:
            raise ValueError(
                f"`batch`: leading dimensions must divide by {count}, {microbatches} microbatches "
                f"* {parts.num_shares} devices that share each, got a leaf of shape {shape}."
            )
        return jax.ShapeDtypeStruct((shape[0] // count, *shape[1:]), dtype)

    return jax.tree.map(part, batch)
