"""Make a pipeline from a model, a schedule and a mesh."""

from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from .._support.checks import as_number, check_choice, checks_flags
from .._support.types import PyTree
from ._host_pipeline import HostPipeline
from ._one_program import OneProgram
from ._partition import blocks_by_bytes
from ._pipelined import Pipelined
from ._plan import Plan, stage_kinds
from .model import Block, LayeredModel, StageLayout, model_blocks
from .schedules import Schedule

Executor = Literal["one_program", "host"]
"""How a pipeline runs: as one program on all devices, or as programs that the host dispatches."""
BatchMemory = Literal["device", "host"]


@checks_flags("pipelined")
def pipelined(
    model: LayeredModel,
    params: Sequence[PyTree],
    schedule: Schedule,
    *,
    parts: Sequence[Any] | None = None,
    mesh: Mesh,
    executor: Executor = "one_program",
    axis_name: str = "stage",
    data_axes: str | Sequence[str] = (),
    param_specs: PyTree | None = None,
    remat: bool = False,
    batch_memory: BatchMemory = "device",
    gradient_scale: float = 1.0,
    model_state: Sequence[PyTree] | None = None,
) -> Pipelined:
    """Make a loss function that runs a model as a pipeline of stages.

        pipe = js.pipelined(model, params, js.schedules.one_f_one_b(4, 16), mesh=mesh)
        step = js.make_train_step(pipe, optimizer, sync=js.slowmo("replica"), mesh=mesh)
        state = step.init(params)

    The guide is `docs/model-parallel.md`. More on each argument:
    [docs/api/pipeline.md](#details).

    Args:
      model: the layers and the loss.
      params: one tree per layer, arrays or `ShapeDtypeStruct`s; only shapes and dtypes are used.
      schedule: the order of operations, with as many stages as `mesh` has along `axis_name`.
      parts: layers of each stage, as `js.partition_uniform` returns them; None: the partition that
        minimizes the bytes of parameters of the largest stage.
      mesh: the devices; axes other than `axis_name` and `data_axes` are left to a `shard_map`
        outside, or to the compiler.
      executor: `"one_program"` runs on all devices and processes, `"host"` dispatches a program per
        stage and operation from one process.
      axis_name: the axis of the stages.
      data_axes: axes inside a replica between whose devices each microbatch is split.
      param_specs: a `PartitionSpec` per leaf of `params`, over axes other than that of the stages,
        or a prefix of such a tree; None: whole on every device of a stage.
      remat: whether to recompute activations inside a stage in the backward pass.
      batch_memory: the memory that holds the microbatches, `"device"` or `"host"`.
      gradient_scale: a factor of the gradients between stages, which is divided out at the end.
      model_state: one tree per layer, {} without state, of arrays or `ShapeDtypeStruct`s.

    Returns:
      A `js.pipeline.Pipelined`, a loss function; pass the model's parameters to `step.init`.

    Raises:
      ValueError: stages, axes, parts or tied leaves that do not fit; with `executor="host"` devices
        of other processes; when traced, a batch that does not divide, or in one program activations
        whose types differ between stages.

    Communication: per tick (one program) or per microbatch and hop (`"host"`) one activation and
      one cotangent; at the end of a step one all-reduce of loss and metrics, and of tied gradients;
      over `data_axes` an all-reduce, or for sharded leaves an all-gather and a reduce-scatter.
    """
    check_choice("executor", executor, Executor)
    check_choice("batch_memory", batch_memory, BatchMemory)
    _check_parts(model, schedule, mesh, gradient_scale)
    is_one = isinstance(data_axes, str) or not isinstance(data_axes, Sequence)
    axes: tuple[Any, ...] = (data_axes,) if is_one else tuple(data_axes)
    _check_axes(schedule, mesh, axis_name, axes)
    blocks = _stage_blocks(model, params, schedule, parts)
    states = model.checked_state(model_state) if model.takes_state else None
    on_mesh: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    layout = StageLayout(
        model,
        params,
        blocks,
        schedule.placement,
        param_specs=param_specs,
        beside=states,
        **on_mesh,
    )
    layouts = [layout]
    if states is not None:
        untied = LayeredModel(model.layers, model.loss, takes=model.takes)
        runs = layout.all_runs
        layouts.append(
            StageLayout(untied, states, blocks, schedule.placement, runs=runs, **on_mesh)
        )
    kinds, kind_index = stage_kinds(model, layouts, loops=not schedule.splits)
    plan = Plan(
        model=model,
        schedule=schedule,
        mesh=mesh,
        axis_name=axis_name,
        data_axes=axes,
        layout=layout,
        state_layout=layouts[-1] if model.takes_state else None,
        kinds=kinds,
        kind_index=kind_index,
        tied=layout.tied_places(),
        remat=remat,
        gradient_scale=gradient_scale,
        batch_memory=batch_memory,
    )
    return HostPipeline(plan) if executor == "host" else OneProgram(plan)


def _stage_blocks(
    model: LayeredModel, params: Sequence[PyTree], schedule: Schedule, parts: Any
) -> tuple[Block, ...]:
    """Return the layers of each stage of the model."""
    model.check_params(params)
    count = schedule.num_stages * schedule.num_chunks
    if parts is None and count <= len(params):
        return tuple(Block(*block) for block in blocks_by_bytes(params, count))
    return model_blocks(len(model.layers), schedule.num_stages, schedule.num_chunks, parts)


def _check_parts(model: Any, schedule: Any, mesh: Any, gradient_scale: Any) -> None:
    """Raise `ValueError` for an argument of another kind."""
    needed = {
        "model": (model, LayeredModel, "js.LayeredModel"),
        "schedule": (schedule, Schedule, "js.pipeline.Schedule"),
        "mesh": (mesh, Mesh, "jax.sharding.Mesh"),
    }
    for argument, (value, kind, name) in needed.items():
        if not isinstance(value, kind):
            raise ValueError(f"`{argument}` must be a {name}, got {type(value).__name__}.")
    if (as_number(gradient_scale) or 0) <= 0:
        raise ValueError(f"`gradient_scale` must be a number above 0, got {gradient_scale!r}.")


def _check_axes(schedule: Schedule, mesh: Mesh, axis_name: Any, data_axes: tuple[Any, ...]) -> None:
    """Raise `ValueError` for axes that the mesh lacks, or that have another size or use."""
    for argument, name in (("axis_name", axis_name), *(("data_axes", a) for a in data_axes)):
        if not isinstance(name, str) or name not in mesh.axis_names:
            raise ValueError(
                f"`{argument}` must be of the axes {mesh.axis_names} of `mesh`, got {name!r}."
            )
    if axis_name in data_axes or len(set(data_axes)) < len(data_axes):
        raise ValueError(
            f"`data_axes` must be different axes, and not that of the stages, got {data_axes!r}."
        )
    if mesh.shape[axis_name] != schedule.num_stages:
        raise ValueError(
            f"`schedule` must have as many stages as `mesh` has along {axis_name!r}, "
            f"{mesh.shape[axis_name]}, got {schedule.num_stages} stages."
        )
