"""`schedule_report`: what a schedule costs a pipeline."""

from ...._support.types import PyTree
from ....pipeline import HostPipeline, Pipelined
from ._compiled import compiled_figures
from ._costs import stage_costs
from ._held import held_bytes, message_bytes, permuted_bytes, sent_bytes
from ._report import ModelStage, ScheduleReport
from ._stages import num_bytes, parts_of, stages_of


def schedule_report(
    pipe: Pipelined,
    batch: PyTree,
    *,
    compiled: bool = True,
    flops_per_second: float | None = None,
    bytes_per_second: float | None = None,
) -> ScheduleReport:
    """Predicts what a schedule costs a model, beside what the compiled program says.

        report = js.schedule_report(pipe, batch)
        print(report)  # the grid, and tables
        report.picture("schedule.png")

    Each operation of each stage is compiled for itself, and what the compiler counts in it is its
    cost. The table of the schedule then gives the bubble, the bytes that stages hold between
    forward and backward pass, and the bytes that they send. Nothing runs. Compilers count a loop's
    body once, so a layer with a `lax.scan` of its own counts too little; for times that were
    measured there is `pipe.schedule.simulate(forward=[...], ...)`.

    Args:
      pipe: what `js.pipelined` made.
      batch: arrays or types, one replica's batch, as `pipe.loss_fn` takes it.
      compiled: compile the program of loss and gradients, too, and read its memory, its permutes
        and the lengths of its loops; of one program.
      flops_per_second: speed of a device. With it costs are seconds, not FLOPs.
      bytes_per_second: speed of the links between stages; needs `flops_per_second`. None: messages
        take no time.

    Returns:
      A `ScheduleReport`.

    Raises:
      ValueError: no pipeline, a batch that does not divide, a speed that is not > 0, or one without
        the other.
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
    parts = parts_of(pipe)
    schedule, stages = parts.schedule, stages_of(parts, batch)
    costs = stage_costs(stages, splits=schedule.splits, forward_only=schedule.forward_only)
    made = tuple(
        ModelStage(
            stage=schedule.placement[k],
            layers=parts.blocks[k],
            forward=cost.forward.flops / speed,
            backward_input=cost.backward_input.flops / speed,
            backward_weight=cost.backward_weight.flops / speed,
            temp_bytes=cost.temp_bytes,
            stash_bytes=num_bytes(stage.program.stash),
            kept_bytes=num_bytes(stage.program.kept) if schedule.splits else 0,
        )
        for k, (stage, cost) in enumerate(zip(stages, costs, strict=True))
    )
    times = {
        "forward": [stage.forward for stage in made],
        "backward_input": [stage.backward_input for stage in made],
        "backward_weight": [stage.backward_weight for stage in made],
    }
    largest = max((message_bytes(stages, k, "F") for k in range(len(stages) - 1)), default=0)
    send = largest / link if bytes_per_second is not None else 0.0
    lockstep = not isinstance(pipe, HostPipeline)
    figures = compiled_figures(pipe, batch) if compiled and lockstep else None
    return ScheduleReport(
        schedule=schedule,
        lockstep=lockstep,
        unit="FLOP" if flops_per_second is None else "s",
        stages=made,
        simulation=schedule.simulate(**times, send=send, lockstep=lockstep),
        other=schedule.simulate(**times, send=send, lockstep=not lockstep),
        held_bytes=held_bytes(schedule, stages),
        sent_bytes=sent_bytes(schedule, stages),
        permuted_bytes=permuted_bytes(schedule, stages) if lockstep else 0,
        compiled=figures,
    )


def _speed(name: str, value: float | None) -> float:
    if value is not None and not value > 0:
        raise ValueError(f"`{name}` must be > 0, got {value}.")
    return 1.0 if value is None else value
