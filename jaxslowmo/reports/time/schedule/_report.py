"""A report on a pipeline's schedule: as text and as a picture."""

import os
from dataclasses import dataclass
from functools import cached_property

from ....pipeline import Schedule, schedules
from ....pipeline.schedules import Simulation


@dataclass(frozen=True)
class ModelStage:
    """One stage of the model.

    Attributes:
      stage: the device stage that holds it.
      layers: [start, end) of its layers.
      forward: cost of F.
      backward_input: of B; of the whole backward pass, where the schedule does not split it.
      backward_weight: of W; 0 where the schedule does not split the backward pass.
      temp_bytes: of the operation, compiled for itself, that takes most memory beside its arguments
        and results.
      stash_bytes: what F leaves for the backward pass of a microbatch.
      kept_bytes: what B leaves for W besides.
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
    """What the compiled program of loss and gradients says of itself, for one device.

    Attributes:
      temp_bytes: memory for all that is neither argument nor result.
      permutes: collective permutes over the stages that a step executes.
      permuted_bytes: what a device hands to them.
      trip_counts: of the loops around them, in ticks.
    """

    temp_bytes: int
    permutes: int
    permuted_bytes: int
    trip_counts: tuple[int | None, ...]


@dataclass(frozen=True)
class ScheduleReport:
    """What a schedule costs a model. `str(report)` is the grid with tables.

    Attributes:
      schedule: which stage computes what when.
      lockstep: whether the pipeline is one program, whose stages begin each tick together.
      unit: of costs and times: "FLOP" or "s".
      stages: the stages of the model.
      simulation: the step as this pipeline runs it, with these costs.
      other: the step if stages ran free, of one program; in lockstep, of others.
      held_bytes: per device stage, the most that it holds of what F and B leave.
      sent_bytes: per device stage, activations and cotangents that it sends in a step.
      permuted_bytes: of one program, what one device hands to collective permutes in a step: more
        than is sent, since every tick permutes.
      compiled: what the compiled program says, of one program; None where it was not asked for.
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

    @cached_property
    def title(self) -> str:
        """The schedule with its sizes."""
        schedule = self.schedule
        chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
        return (
            f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} "
            f"microbatches{chunks}"
        )

    def __str__(self) -> str:
        parts = [[self.title], _facts(self), _by_model_stage(self), _by_device_stage(self)]
        return "\n\n".join(["\n".join(lines) for lines in parts] + [schedules.grid(self.schedule)])

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the step to scale and writes it to a file; its ending decides the format.

        Raises:
          ModuleNotFoundError: matplotlib, of the extra `train`, is not installed.
        """
        how = "one program, in lockstep" if self.lockstep else "each stage as soon as it can"
        line = f"{how}; time in {self.unit}; bubble {_percent(self.bubble)}"
        schedules.picture(self.simulation, path, title=self.title, lines=[line])


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
    return _aligned(rows if report.compiled else [row[:2] for row in rows])


def _of_one_program(report: ScheduleReport) -> list[list[str]]:
    found = report.compiled
    rows = [
        ["ticks", str(len(report.schedule.ticks())), ""],
        ["permuted bytes, a device", f"{report.permuted_bytes:,}", ""],
        ["held bytes, the most on a stage", f"{max(report.held_bytes):,}", ""],
    ]
    if found is None:
        return rows
    rows[0][-1] = ", ".join(map(str, found.trip_counts))
    rows[1][-1] = f"{found.permuted_bytes:,}"
    return [*rows, ["temporary bytes, a device", "", f"{found.temp_bytes:,}"]]


def _by_model_stage(report: ScheduleReport) -> list[str]:
    head = ["model stage", "on stage", "layers", f"F, {report.unit}", "B", "W", "temp bytes"]
    rows = [[*head, "stash bytes", "kept for W"]]
    for k, stage in enumerate(report.stages):
        costs = (stage.forward, stage.backward_input, stage.backward_weight)
        layers = f"{stage.layers[0]} to {stage.layers[1] - 1}"
        sizes = (stage.temp_bytes, stage.stash_bytes, stage.kept_bytes)
        cells = (*(f"{cost:.4g}" for cost in costs), *(f"{size:,}" for size in sizes))
        rows.append([str(k), str(stage.stage), layers, *cells])
    return _aligned(rows)


def _by_device_stage(report: ScheduleReport) -> list[str]:
    rows = [["stage", "stash", "held bytes", "messages", "sent bytes"]]
    for stage, held in enumerate(report.held_bytes):
        counts = report.schedule.stash[stage], report.schedule.sends[stage]
        sent = report.sent_bytes[stage]
        rows.append([str(stage), str(counts[0]), f"{held:,}", str(counts[1]), f"{sent:,}"])
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
