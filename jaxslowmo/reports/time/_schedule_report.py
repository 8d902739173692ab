"""`schedule_report`: what a schedule costs a pipeline, as text and as a picture."""

import os
from dataclasses import dataclass

from ..._support.types import PyTree
from ...pipeline import HostPipeline, Pipelined, Schedule
from ...pipeline.schedules import Simulation
from ..communication import aligned
from ._schedule_grid import schedule_grid, schedule_title
from ._schedule_picture import schedule_picture
from ._stage_costs import (
    CompiledPipeline,
    ModelStage,
    compiled_figures,
    message_bytes,
    model_stages,
    num_bytes,
    permuted_bytes,
    sent_bytes,
    stages_of,
)


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
        texts = ["\n".join(lines) for lines in tables]
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
    speed = _speed("flops_per_second", flops_per_second)
    link = _speed("bytes_per_second", bytes_per_second)
    if bytes_per_second is not None and flops_per_second is None:
        raise ValueError(
            "`bytes_per_second` needs `flops_per_second`: messages and operations must be in one "
            "unit, seconds."
        )
    schedule, stages = pipe.schedule, stages_of(pipe, batch)
    model = model_stages(pipe, stages, speed)
    times = {
        "forward": [stage.forward for stage in model],
        "backward_input": [stage.backward_input for stage in model],
        "backward_weight": [stage.backward_weight for stage in model],
    }
    largest = max((message_bytes(stages, k, "F") for k in range(len(stages) - 1)), default=0)
    send = largest / link if bytes_per_second is not None else 0.0
    lockstep = not isinstance(pipe, HostPipeline)
    return ScheduleReport(
        schedule=schedule,
        lockstep=lockstep,
        unit="FLOP" if flops_per_second is None else "s",
        stages=model,
        simulation=schedule.simulate(**times, send=send, lockstep=lockstep),
        other=schedule.simulate(**times, send=send, lockstep=not lockstep),
        held_bytes=schedule.most_held(
            [num_bytes(stage.program.stash) for stage in stages],
            [num_bytes(stage.program.kept) for stage in stages],
        ),
        sent_bytes=sent_bytes(schedule, stages),
        permuted_bytes=permuted_bytes(schedule, stages) if lockstep else 0,
        compiled=compiled_figures(pipe, batch) if compiled and lockstep else None,
    )


def _speed(name: str, value: float | None) -> float:
    if value is not None and not value > 0:
        raise ValueError(f"`{name}` must be > 0, got {value}.")
    return 1.0 if value is None else value


def _facts(report: ScheduleReport) -> list[str]:
    how = ("in lockstep", "if stages ran free")
    first, second = how if report.lockstep else ("each stage as soon as it can", "in lockstep")
    rows = [
        ["", "predicted", "compiled"],
        [f"bubble, {first}", _percent(report.bubble), ""],
        [f"bubble, {second}", _percent(report.other.bubble), ""],
        [f"time, {report.unit}", f"{report.simulation.time:.4g}", ""],
    ]
    if report.lockstep:
        rows += _of_one_program(report)
    return aligned(rows if report.compiled else [row[:2] for row in rows])


def _of_one_program(report: ScheduleReport) -> list[list[str]]:
    compiled = report.compiled
    rows = [
        ["ticks", str(len(report.schedule.ticks())), ""],
        ["permuted bytes, a device", f"{report.permuted_bytes:,}", ""],
        ["held bytes, the most on a stage", f"{max(report.held_bytes):,}", ""],
    ]
    if compiled is None:
        return rows
    rows[0][-1] = ", ".join(map(str, compiled.trip_counts))
    rows[1][-1] = f"{compiled.permuted_bytes:,}"
    return [*rows, ["temporary bytes, a device", "", f"{compiled.temp_bytes:,}"]]


def _by_model_stage(report: ScheduleReport) -> list[str]:
    head = ["model stage", "on stage", "layers", f"F, {report.unit}", "B", "W", "temp bytes"]
    rows = [[*head, "stash bytes", "kept for W"]]
    for k, stage in enumerate(report.stages):
        costs = (stage.forward, stage.backward_input, stage.backward_weight)
        layers = f"{stage.layers[0]} to {stage.layers[1] - 1}"
        sizes = (stage.temp_bytes, stage.stash_bytes, stage.kept_bytes)
        cells = (*(f"{cost:.4g}" for cost in costs), *(f"{size:,}" for size in sizes))
        rows.append([str(k), str(stage.stage), layers, *cells])
    return aligned(rows)


def _by_device_stage(report: ScheduleReport) -> list[str]:
    rows = [["stage", "stash", "held bytes", "messages", "sent bytes"]]
    for stage, held in enumerate(report.held_bytes):
        counts = report.schedule.stash[stage], report.schedule.sends[stage]
        sent = report.sent_bytes[stage]
        rows.append([str(stage), str(counts[0]), f"{held:,}", str(counts[1]), f"{sent:,}"])
    return aligned(rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
