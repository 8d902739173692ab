"""`schedule_report`: what a schedule costs a pipeline, as text and as a picture."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.checks import checks_flags
from ..._support.types import PyTree
from ...pipeline import HostPipeline, Pipelined, Schedule, split_stage
from ...pipeline.model import WithState, in_microbatches, microbatch_of, without_state
from ...pipeline.schedules import Simulation
from ..communication import aligned, comm_report_of
from ._schedule_grid import schedule_grid, schedule_title
from ._schedule_picture import schedule_picture


@dataclass(frozen=True)
class ModelStage:
    """The costs and the memory of one stage of a model, in a `ScheduleReport`.

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
class ScheduleReport:
    """The costs of a schedule for a model; `str(report)` is the grid with tables.

    Attributes:
      schedule: the schedule: which stage computes what when.
      lockstep: whether the pipeline is one program, whose stages begin each tick together.
      unit: the unit of costs and times: "FLOP" or "s".
      stages: the stages of the model.
      simulation: the step as this pipeline runs it, with these costs.
      other: the step in the other way: as if stages ran freely for one program, else in lockstep.
      held_bytes: per device stage, the most that it holds of what F and B leave.
      sent_bytes: per device stage, activations and cotangents that it sends in a step.
      permuted_bytes: bytes that one device hands to collective permutes in a step of one program;
        more than is sent, since every tick permutes. 0 for the host executor.
      compiled: figures of the compiled program; None for the host executor, or if not requested.
    """

    schedule: Schedule
    lockstep: bool
    unit: str
    stages: tuple[ModelStage, ...]
    simulation: Simulation
    other: Simulation
    held_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    permuted_bytes: int
    compiled: CompiledPipeline | None = None

    @property
    def bubble(self) -> float:
        """Share of the devices' time that is idle, as this pipeline runs the schedule."""
        return self.simulation.bubble

    def __str__(self) -> str:
        tables = (_facts(self), _by_model_stage(self), _by_device_stage(self))
        texts = ["\n".join(aligned(rows)) for rows in tables]
        return "\n\n".join([schedule_title(self.schedule), *texts, schedule_grid(self.schedule)])

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the step to scale and write it to a file, whose ending decides the format.

        Raises:
          ModuleNotFoundError: matplotlib, of the extra `train`, is not installed.
        """
        how = "one program, in lockstep" if self.lockstep else "each stage as soon as it can"
        line = f"{how}; time in {self.unit}; bubble {_percent(self.bubble)}"
        title = schedule_title(self.schedule)
        schedule_picture(self.simulation, path, title=title, lines=[line])


@checks_flags("schedule_report")
def schedule_report(
    pipe: Pipelined,
    batch: PyTree,
    *,
    compiled: bool = True,
    flops_per_second: float | None = None,
    bytes_per_second: float | None = None,
) -> ScheduleReport:
    """Predict the costs of a schedule for a model, next to figures of the compiled program.

        report = js.schedule_report(pipe, batch)
        print(report)  # the grid, and tables
        report.picture("schedule.png")

    Each operation of each stage is compiled by itself, and its cost is what the compiler counts in
    it. The table of the schedule then gives the bubble, the bytes that stages hold between
    forward and backward pass, and the bytes that they send. Nothing runs. Compilers count a loop's
    body once, so a layer with a `lax.scan` of its own counts too little; for times that were
    measured there is `pipe.schedule.simulate(forward=[...], ...)`.

    Args:
      pipe: a pipeline that `js.pipelined` made.
      batch: arrays or types: one replica's batch, as the loss function takes it.
      compiled: whether to compile the program of loss and gradients too, and to read its memory,
        its permutes and the lengths of its loops; only for one program.
      flops_per_second: speed of a device. With it, costs are seconds, not FLOPs.
      bytes_per_second: speed of the links between stages; needs `flops_per_second`. None: messages
        take no time.

    Returns:
      A `ScheduleReport`.

    Raises:
      ValueError: `pipe` is no pipeline, the batch cannot be divided, a speed is not > 0, or
        `bytes_per_second` is given without `flops_per_second`.
    """
    if not isinstance(pipe, Pipelined):
        raise ValueError(f"`pipe` must be what js.pipelined made, got {type(pipe).__name__}.")
    speeds = {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second}
    for name, speed in speeds.items():
        if speed is not None and not speed > 0:
            raise ValueError(f"`{name}` must be > 0, got {speed}.")
    if bytes_per_second is not None and flops_per_second is None:
        raise ValueError("`bytes_per_second` needs `flops_per_second`, so that all is in seconds.")
    schedule = pipe.schedule
    stages, edges = _stages_of(pipe, batch, flops_per_second or 1.0)
    costs: Any = {
        name: [getattr(stage, name) for stage in stages]
        for name in ("forward", "backward_input", "backward_weight")
    }
    if bytes_per_second is not None:
        costs["send"] = max((forward for forward, _ in edges), default=0) / bytes_per_second
    sent = [0] * schedule.num_stages
    for op in filter(schedule.is_sent, schedule.in_order):
        k = schedule.model_stage(op)
        sent[op.stage] += edges[k][0] if op.kind == "F" else edges[k - 1][1]
    lockstep = not isinstance(pipe, HostPipeline)
    return ScheduleReport(
        schedule=schedule,
        lockstep=lockstep,
        unit="FLOP" if flops_per_second is None else "s",
        stages=stages,
        simulation=schedule.simulate(**costs, lockstep=lockstep),
        other=schedule.simulate(**costs, lockstep=not lockstep),
        held_bytes=schedule.most_held(
            [stage.stash_bytes for stage in stages], [stage.kept_bytes for stage in stages]
        ),
        sent_bytes=tuple(sent),
        permuted_bytes=_permuted_bytes(schedule, edges) if lockstep else 0,
        compiled=_compiled_figures(pipe, batch) if compiled and lockstep else None,
    )


def _stages_of(
    pipe: Pipelined, batch: PyTree, speed: float
) -> tuple[tuple[ModelStage, ...], list[tuple[int, int]]]:
    """Return the stages of a model, and what goes over each edge between two of them.

    Args:
      pipe: the pipeline.
      batch: arrays or types of one replica's batch.
      speed: FLOPs in a unit of cost.

    Returns:
      The stages, and for each but the last the bytes of its activation and of its cotangent. If the
      schedule does not split the backward pass, all of it counts as B.

    Raises:
      ValueError: the pipeline refuses the batch.
    """
    model, layout, schedule, states = pipe.model, pipe.layout, pipe.schedule, None
    types, microbatch = (
        layout.unstack(layout.types),
        jax.eval_shape(partial(_microbatch, pipe), batch),
    )
    if pipe.state_layout is not None:
        states = pipe.state_layout.unstack(pipe.state_layout.types)
    cost, stages, edges = partial(_cost, {}), [], []
    x: PyTree = None
    for on_stage, (start, end) in zip(schedule.placement, layout.blocks, strict=True):
        weights, is_last = tuple(types[start:end]), end == len(model.layers)
        # Layers are written out: of a loop the compiler counts one turn.
        fn = model.stage(start, end)
        stage_input = x if states is None else WithState(x, list(states[start:end]))
        program = split_stage(fn, weights, stage_input, microbatch, loss=is_last, remat=pipe.remat)
        # A leaf that is no floating-point number has no cotangent.
        dy = jax.tree.map(lambda y: y if jnp.issubdtype(y.dtype, jnp.inexact) else None, program.y)
        costs = [cost(program.forward, weights, stage_input, microbatch)]
        inputs = (weights, microbatch, program.stash)
        if schedule.splits:
            costs.append(cost(program.backward_input, *inputs, dy))
            costs.append(cost(program.backward_weight, *inputs, program.kept))
        elif not schedule.forward_only:
            costs.append(cost(program.backward, *inputs, dy))
        stage = ModelStage(
            on_stage,
            (start, end),
            *[flops / speed for flops, _ in costs] + [0.0] * (3 - len(costs)),
            temp_bytes=max(temp_bytes for _, temp_bytes in costs),
            stash_bytes=_num_bytes(program.stash),
            kept_bytes=_num_bytes(program.kept) if schedule.splits else 0,
        )
        stages.append(stage)
        x = without_state(program.y)
        edges.append((_num_bytes(x), _num_bytes(without_state(dy))))
    return tuple(stages), edges[:-1]


def _microbatch(pipe: Pipelined, batch: PyTree) -> PyTree:
    """Return one device's part of the first microbatch, as the layers take it."""
    count = pipe.schedule.num_microbatches
    shares = {axis: pipe.mesh.shape[axis] for axis in pipe.data_axes}
    in_microbatches(batch, count, shares)  # raises for what the pipeline does not divide
    parts = in_microbatches(batch, count * math.prod(shares.values()), {})
    return microbatch_of(parts, jax.random.key(0) if pipe.model.takes_key else None, 0, 0)


def _cost(
    costs: dict[str, tuple[float, int]], fn: Callable[..., Any], *types: Any
) -> tuple[float, int]:
    """Return FLOPs and temporary bytes of an operation.

    `costs` maps texts of programs to them, since equal ones are compiled once.
    """
    lowered = jax.jit(fn).lower(*types)
    text = lowered.as_text()
    if text not in costs:
        compiled: Any = lowered.compile()
        flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        costs[text] = flops, int(compiled.memory_analysis().temp_size_in_bytes)
    return costs[text]


def _num_bytes(types: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))


def _permuted_bytes(schedule: Schedule, edges: Sequence[tuple[int, int]]) -> int:
    """Return the bytes that one device hands to collective permutes in a step of one program.

    Every tick permutes an activation and a cotangent for each distance between neighbouring stages,
    whether or not there is one to send.
    """
    distances = {(b - a) % schedule.num_stages for a, b in pairwise(schedule.placement)} - {0}
    each = sum(edges[0][: 1 if schedule.forward_only else 2]) if edges else 0
    return len(schedule.ticks()) * len(distances) * each


def _compiled_figures(pipe: Pipelined, batch: PyTree) -> CompiledPipeline:
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


def _facts(report: ScheduleReport) -> list[list[str]]:
    ways = ("in lockstep", "if stages ran free")
    if not report.lockstep:
        ways = ("each stage as soon as it can", "in lockstep")
    rows = [
        ["", "predicted", "compiled"],
        [f"bubble, {ways[0]}", _percent(report.bubble), ""],
        [f"bubble, {ways[1]}", _percent(report.other.bubble), ""],
        [f"time, {report.unit}", f"{report.simulation.time:.4g}", ""],
    ]
    trips = permuted = temporary = ""
    if compiled := report.compiled:
        trips = ", ".join(map(str, compiled.trip_counts))
        permuted, temporary = f"{compiled.permuted_bytes:,}", f"{compiled.temp_bytes:,}"
    if report.lockstep:
        rows.append(["ticks", str(len(report.schedule.ticks())), trips])
        rows.append(["permuted bytes, a device", f"{report.permuted_bytes:,}", permuted])
        rows.append(["held bytes, the most on a stage", f"{max(report.held_bytes):,}", ""])
    if not compiled:
        return [row[:2] for row in rows]
    return [*rows, ["temporary bytes, a device", "", temporary]]


def _by_model_stage(report: ScheduleReport) -> list[list[str]]:
    head = ["model stage", "on stage", "layers", f"F, {report.unit}", "B", "W", "temp bytes"]
    rows = [[*head, "stash bytes", "kept for W"]]
    for k, stage in enumerate(report.stages):
        on_stage, (start, end), *numbers = astuple(stage)
        cells = [f"{cost:.4g}" for cost in numbers[:3]] + [f"{size:,}" for size in numbers[3:]]
        rows.append([str(k), str(on_stage), f"{start} to {end - 1}", *cells])
    return rows


def _by_device_stage(report: ScheduleReport) -> list[list[str]]:
    columns = report.schedule.stash, report.held_bytes, report.schedule.sends, report.sent_bytes
    rows = [["stage", "stash", "held bytes", "messages", "sent bytes"]]
    for stage, (stash, held, sends, sent) in enumerate(zip(*columns, strict=True)):
        rows.append([str(stage), str(stash), f"{held:,}", str(sends), f"{sent:,}"])
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
