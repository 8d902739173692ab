"""Costs, memory and messages of the stages of a pipeline, from the compiler and the schedule."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...pipeline import Pipelined, Schedule, StageProgram, split_stage
from ...pipeline.model import WithState, without_state
from ...pipeline.plan import in_microbatches, microbatch_of
from ..communication import comm_report_of


@dataclass(frozen=True)
class ModelStage:
    """One stage of the model.

    Attributes:
      stage: the device stage that holds it.
      layers: [start, end) of its layers.
      forward: cost of F.
      backward_input: cost of B, or of the whole backward pass if the schedule does not split it.
      backward_weight: cost of W; 0 if the schedule does not split the backward pass.
      temp_bytes: memory for values that are neither arguments nor results, of the operation that
        needs most of it; each operation is compiled by itself.
      stash_bytes: bytes that F keeps for the backward pass of a microbatch.
      kept_bytes: bytes that B keeps for W in addition.
    """

    stage: int
    layers: tuple[int, int]
    forward: float
    backward_input: float
    backward_weight: float
    temp_bytes: int
    stash_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class CompiledPipeline:
    """Figures of the compiled program of loss and gradients, for one device.

    Attributes:
      temp_bytes: memory for values that are neither arguments nor results.
      permutes: number of collective permutes over the stages that a step executes.
      permuted_bytes: bytes that a device hands to them.
      trip_counts: number of turns of each loop around them, in ticks; None where it is unknown.
    """

    temp_bytes: int
    permutes: int
    permuted_bytes: int
    trip_counts: tuple[int | None, ...]


@dataclass(frozen=True)
class StageTypes:
    """A stage of the model, and the types of its inputs.

    Attributes:
      program: the operations of the stage.
      weights: types of the parameters of its layers.
      x: type of the output of the stage before; None for the first stage.
      microbatch: types of one device's part of a microbatch.
    """

    program: StageProgram
    weights: PyTree
    x: PyTree
    microbatch: PyTree

    @property
    def cotangent(self) -> PyTree:
        """The type of the cotangent of its result; None for leaves that have none."""
        return _cotangent(self.program.y)


def stages_of(pipe: Pipelined, batch: PyTree) -> list[StageTypes]:
    """Return the stages of a model, for a batch that the pipeline accepts.

    Raises:
      ValueError: the schedule and the data axes of the pipeline do not divide the batch.
    """
    model, types, states = pipe.model, pipe.layout.unstack(pipe.layout.types), None
    if pipe.state_layout is not None:
        states = pipe.state_layout.unstack(pipe.state_layout.types)
    microbatch = jax.eval_shape(lambda batch: _microbatch(pipe, batch), batch)
    stages: list[StageTypes] = []
    x: PyTree = None
    for start, end in pipe.layout.blocks:
        weights = tuple(types[start:end])
        # Layers are written out: of a loop the compiler counts one turn.
        fn, is_last = model.stage(start, end), end == len(model.layers)
        stage_input = x if states is None else WithState(x, list(states[start:end]))
        program = split_stage(fn, weights, stage_input, microbatch, loss=is_last, remat=pipe.remat)
        stages.append(StageTypes(program, weights, stage_input, microbatch))
        x = without_state(program.y)
    return stages


def _microbatch(pipe: Pipelined, batch: PyTree) -> PyTree:
    """Return one device's part of the first microbatch, as the layers take it."""
    count = pipe.schedule.num_microbatches
    shares = {axis: pipe.mesh.shape[axis] for axis in pipe.data_axes}
    in_microbatches(batch, count, shares)  # raises for what the pipeline does not divide
    parts = in_microbatches(batch, count * math.prod(shares.values()), {})
    return microbatch_of(parts, jax.random.key(0) if pipe.model.takes_key else None, 0, 0)


def num_bytes(types: PyTree) -> int:
    """Return the bytes of all arrays of a tree of types."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))


class Cost(NamedTuple):
    """The floating-point operations and the temporary bytes of one compiled operation."""

    flops: float
    temp_bytes: int


def model_stages(
    pipe: Pipelined, stages: Sequence[StageTypes], speed: float
) -> tuple[ModelStage, ...]:
    """Return the costs of F, B and W of each stage of the model, and the bytes that they keep.

    If the schedule does not split the backward pass, all of it counts as B.

    Args:
      pipe: the pipeline.
      stages: the stages of its model.
      speed: number of floating-point operations in a unit of cost.
    """
    count, schedule = partial(_compiled_cost, {}), pipe.schedule
    model = []
    for k, stage in enumerate(stages):
        program, dy = stage.program, stage.cotangent
        costs = [count(program.forward, stage.weights, stage.x, stage.microbatch)]
        inputs = stage.weights, stage.microbatch, program.stash
        if schedule.splits:
            costs.append(count(program.backward_input, *inputs, dy))
            costs.append(count(program.backward_weight, *inputs, program.kept))
        elif not schedule.forward_only:
            costs.append(count(program.backward, *inputs, dy))
        flops = [cost.flops / speed for cost in costs] + [0.0] * (3 - len(costs))
        model.append(
            ModelStage(
                schedule.placement[k],
                pipe.layout.blocks[k],
                *flops,
                temp_bytes=max(cost.temp_bytes for cost in costs),
                stash_bytes=num_bytes(program.stash),
                kept_bytes=num_bytes(program.kept) if schedule.splits else 0,
            )
        )
    return tuple(model)


def _compiled_cost(costs: dict[str, Cost], fn: Callable[..., Any], *types: Any) -> Cost:
    """Return the cost of an operation; `costs` by program text, as equal ones are compiled once."""
    lowered = jax.jit(fn).lower(*types)
    text = lowered.as_text()
    if text not in costs:
        compiled: Any = lowered.compile()
        flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        costs[text] = Cost(flops, int(compiled.memory_analysis().temp_size_in_bytes))
    return costs[text]


def sent_bytes(schedule: Schedule, stages: Sequence[StageTypes]) -> tuple[int, ...]:
    """Return the bytes of activations and cotangents that each device stage sends in a step."""
    sent = [0] * schedule.num_stages
    for operation in filter(schedule.is_sent, schedule.in_order):
        model_stage = schedule.model_stage(operation)
        sent[operation.stage] += message_bytes(stages, model_stage, operation.kind)
    return tuple(sent)


def message_bytes(stages: Sequence[StageTypes], model_stage: int, kind: str) -> int:
    """Return the bytes that a stage of the model sends after F or B."""
    if kind == "F":
        return num_bytes(without_state(stages[model_stage].program.y))
    return num_bytes(_cotangent(without_state(stages[model_stage].x)))


def _cotangent(y: PyTree) -> PyTree:
    """Return the types of a cotangent; None for leaves that have none."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, y)


def permuted_bytes(schedule: Schedule, stages: Sequence[StageTypes]) -> int:
    """Return the bytes that one device hands to collective permutes in a step of one program.

    Every tick permutes an activation and a cotangent for each distance between neighbouring stages,
    whether or not there is one to send.
    """
    if len(stages) == 1:
        return 0
    placement = schedule.placement
    distances = {(b - a) % schedule.num_stages for a, b in pairwise(placement)} - {0}
    each = message_bytes(stages, 0, "F")
    if not schedule.forward_only:
        each += message_bytes(stages, 1, "B")
    return len(schedule.ticks()) * len(distances) * each


def compiled_figures(pipe: Pipelined, batch: PyTree) -> CompiledPipeline:
    """Return figures of the program of loss and gradients; forward-only, of the loss alone."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    more: dict[str, Any] = {}
    if pipe.model.takes_key:
        more["rng"] = jax.eval_shape(lambda: jax.random.key(0))
    if pipe.state_layout is not None:
        more["model_state"] = pipe.state_layout.types
    program: Any = pipe
    if not pipe.schedule.forward_only:
        has_aux = isinstance(jax.eval_shape(pipe, pipe.layout.types, types, **more), tuple)
        program = jax.value_and_grad(pipe, has_aux=has_aux)
    compiled: Any = jax.jit(program).lower(pipe.layout.types, types, **more).compile()
    report = comm_report_of(compiled, mesh=pipe.mesh)
    rows = report.select(collective="collective-permute")
    return CompiledPipeline(
        temp_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        permutes=sum(row.count for row in rows),
        permuted_bytes=sum(row.bytes for row in rows),
        trip_counts=tuple(sorted({row.trip_count for row in rows}, key=str)),
    )
