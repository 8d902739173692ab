"""Make a pipeline of a model, a schedule and a mesh."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from .._support.checks import check_choice
from .._support.types import PyTree
from .host import HostPipeline
from .model import Block, LayeredModel, StageLayout, equal_layers, model_blocks, refuse_keys
from .one_program import OneProgram
from .partition import blocks_by_bytes
from .plan import Pipelined, Plan, Segment, Segments, StageKind
from .schedules import Schedule

Executor = Literal["one_program", "host"]
"""What runs a pipeline: one program on all devices, or the host, a program per operation."""
BatchMemory = Literal["device", "host"]


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
    """Run a model as a pipeline of stages, behind an ordinary loss function.

        pipe = js.pipelined(model, params, js.schedules.one_f_one_b(4, 16), mesh=mesh)
        step = js.make_train_step(pipe, optimizer, sync=js.slowmo("replica"), mesh=mesh)
        state = step.init(params)

    `executor="one_program"` makes one program on all devices. It scans over the schedule's table of
    ticks, which is data: the program does not grow with the number of microbatches. In each tick a
    device computes what the table says of its stage, in one branch of a `lax.switch`, or nothing;
    what stages send each other travels outside of all branches. Every tick lasts as long as its
    longest operation on any stage, so choose the schedule by its bubble in lockstep
    (`schedule.simulate(lockstep=True)`).

    `executor="host"` compiles each operation of each stage for itself. The host dispatches these
    programs in the schedule's order and copies activations and cotangents to the next stage's
    devices; operations that do not depend on each other run at the same time. The bubble is that of
    `schedule.simulate()`, and stages may have activations of any types. One process must see all
    devices, and the loss function and its step cannot be called inside of jax.jit.

    Args:
      model: the layers and the loss. In one program, as in all that `shard_map` maps, a loop inside
        of a layer begins with what its input gives, `jnp.zeros_like(x[0])`, not with
        `jnp.zeros(...)`.
      params: one tree per layer, arrays or `ShapeDtypeStruct`s; shapes and dtypes alone count.
      schedule: which stage computes what when; of as many stages as `mesh` has along `axis_name`.
      parts: layers of each stage, as `js.partition_uniform` and its kin return them; None: such
        that the stage with the most bytes of parameters has as few as can be.
      mesh: the devices; axes other than `axis_name` and `data_axes` (replicas, tensor parallel) are
        left to whoever maps them outside, or to the compiler.
      executor: `"one_program"` or `"host"`.
      axis_name: the axis of the stages.
      data_axes: axes inside a replica between whose devices each microbatch is split. Parameters
        that `param_specs` shards over them are gathered before the schedule, and their gradients
        reduce-scattered after it, once per step.
      param_specs: a `PartitionSpec` per leaf of `params`, over axes other than that of the stages,
        or a prefix of such a tree; None: whole on every device of a stage.
      remat: keep activations between layers of different stages alone, and compute the rest of a
        forward pass again in the backward pass.
      batch_memory: where microbatches wait. `"host"`: in the host's pinned memory, from which a
        stage copies one when it computes it; a batch that lies there already, such as
        `jax.device_put(batch, NamedSharding(mesh, spec, memory_kind="pinned_host"))`, is never
        whole on a device.
      gradient_scale: what gradients are multiplied by between stages, and divided by at the end, in
        float32: for float16, in which small ones vanish.
      model_state: of models whose layers take `state`: one tree per layer, {} for those without,
        arrays or `ShapeDtypeStruct`s; shapes and dtypes alone count.

    Returns:
      A `js.pipeline.Pipelined`: the loss function. `js.make_train_step` takes it in the place of
      one, and `step.init` the model's own parameters.

    Raises:
      ValueError: a schedule of other stages than the mesh, unknown axes, parts that do not cover
        the layers, a stage without layers, tied leaves with unlike specs; with `executor="host"`
        devices of other processes. When the loss function is traced: batches that microbatches or
        data axes don't divide; in one program activations whose structure, shapes or dtypes differ
        between stages.

    Communication: in one program per tick, over `axis_name`, one collective-permute of one
      activation and one of its cotangent between neighbours (two of each for a placement that goes
      down the stages and back up); dispatched by the host per microbatch and hop one copy of each.
      At the end of a step one all-reduce of loss and metrics, and what
      `js.pipeline.sum_tied_gradients` states of tied parameters. Over `data_axes` one all-gather
      and one reduce-scatter of each sharded buffer, one all-reduce of the gradients of the others.
      A collective that the compiler puts inside of a branch, for axes left to it, runs between the
      devices of one stage alone.
    """
    check_choice("executor", executor, Executor)
    check_pipeline(model, schedule)
    data_axes = as_axes(data_axes)
    check_arguments(schedule, mesh, axis_name, data_axes, remat, gradient_scale, batch_memory)
    blocks = _blocks(model, params, schedule, parts)
    states = model.checked_state(model_state) if model.takes_state else None
    placed: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    layout = StageLayout(
        model, params, blocks, schedule.placement, param_specs=param_specs, beside=states, **placed
    )
    layouts = [layout]
    if states is not None:
        untied = LayeredModel(model.layers, model.loss)
        runs = layout.all_runs
        layouts.append(StageLayout(untied, states, blocks, schedule.placement, runs=runs, **placed))
    kinds, of_stage = _stage_kinds(model, layouts)
    plan = Plan(
        model=model,
        schedule=schedule,
        mesh=mesh,
        axis_name=axis_name,
        data_axes=data_axes,
        layout=layout,
        state_layout=layouts[-1] if model.takes_state else None,
        kinds=kinds,
        of_stage=of_stage,
        shifts=np.array([b.start for b in blocks]) - np.array([kinds[i].start for i in of_stage]),
        tied=layout.tied_places(),
        remat=bool(remat),
        gradient_scale=gradient_scale,
        batch_memory=batch_memory,
    )
    return HostPipeline(plan) if executor == "host" else OneProgram(plan)


def _blocks(
    model: LayeredModel, params: Sequence[PyTree], schedule: Schedule, parts: Any
) -> tuple[Block, ...]:
    """Return the layers of each stage of the model."""
    model.check_params(params)
    refuse_keys(params)
    count = schedule.num_stages * schedule.num_chunks
    if parts is None and count <= len(params):
        return tuple(Block(*block) for block in blocks_by_bytes(params, count))
    return model_blocks(len(model.layers), schedule.num_stages, schedule.num_chunks, parts)


def _stage_kinds(
    model: LayeredModel, layouts: Sequence[StageLayout]
) -> tuple[list[StageKind], np.ndarray]:
    """Return the kinds of a model's stages, and which kind each stage is.

    Stages are alike if their functions are equal and their leaves lie alike.

    Args:
      model: the layers.
      layouts: where the parameters lie, and the model state of models that have one.
    """
    kinds: list[StageKind] = []
    blocks, runs = layouts[0].blocks, layouts[0].all_runs
    of_stage = np.zeros(len(blocks), np.int32)
    for k, block in enumerate(blocks):
        ends = k == 0, k == len(blocks) - 1
        own = [_segments_of(layout, k) for layout in layouts]
        layers = model.layers[block.start : block.end]
        for i, kind in enumerate(kinds):
            known = [kind.weights] if kind.states is None else [kind.weights, kind.states]
            others = model.layers[kind.start : kind.start + len(layers)]
            is_alike = (kind.is_first, kind.is_last) == ends
            is_alike = is_alike and all(map(equal_layers, others, layers))
            if is_alike and [*map(_form, known)] == [*map(_form, own)]:
                of_stage[k] = i
                for one, other in zip(known, own, strict=True):
                    first = _first_places(one)
                    for name, start in _first_places(other).items():
                        one.starts[name][k] = start - first[name]
                break
        else:
            of_stage[k] = len(kinds)
            kinds.append(StageKind(model.stage(*block, runs[k]), *ends, block.start, *own))
    return kinds, of_stage


def _segments_of(layout: StageLayout, model_stage: int) -> Segments:
    """Return the leaves of a stage of the model, which stands for its kind."""
    runs, packing = layout.runs(model_stage), layout.packing
    treedef = jax.tree_util.treedef_tuple(layout.treedef(run.start) for run in runs)
    segments = [
        Segment(place, run.count, packing.part_size(place.leaf))
        for run in runs
        for place in layout.places(run)
    ]
    starts = {name: np.zeros(len(layout.blocks), np.int32) for name in packing.axes}
    return Segments(treedef, tuple(segments), packing, starts)


def _first_places(segments: Segments) -> dict[str, int]:
    """Return where the first leaf of a stage lies in each buffer."""
    return {s.place.leaf.buffer: s.place.start for s in reversed(segments.segments)}


def _form(segments: Segments) -> tuple[Any, list[Any]]:
    """Return what is equal for stages whose leaves lie alike, wherever the first of them is."""
    first = _first_places(segments)
    places = [(s.place.start - first[s.place.leaf.buffer], s) for s in segments.segments]
    return segments.treedef, [(start, s.place.leaf, s.count) for start, s in places]


def check_pipeline(model: Any, schedule: Any) -> None:
    """Raise `ValueError` unless these are a `LayeredModel` and a `Schedule`."""
    if not isinstance(model, LayeredModel):
        raise ValueError(
            "`model` must be a js.LayeredModel, of functions of (params, x) and a loss, got "
            f"{type(model).__name__}."
        )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            "`schedule` must be a js.pipeline.Schedule such as js.schedules.one_f_one_b(4, 16), "
            f"got {schedule!r}."
        )


def as_axes(axes: Any) -> tuple[str, ...]:
    """Return the names of `data_axes`, of which one may stand for itself.

    Raises:
      ValueError: something that is neither a name nor a sequence of names.
    """
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`data_axes` must be the name of an axis of `mesh` or a sequence of names, got "
            f"{axes!r}."
        )
    return tuple(names)


def check_arguments(
    schedule: Schedule,
    mesh: Any,
    axis_name: Any,
    data_axes: tuple[str, ...],
    remat: Any,
    gradient_scale: Any,
    batch_memory: Any,
) -> None:
    """Raise `ValueError` for axes, a memory, a scale or a flag that cannot be."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`mesh` must be a jax.sharding.Mesh, whose devices the stages are, got "
            f"{type(mesh).__name__}."
        )
    if not isinstance(axis_name, str):
        raise ValueError(
            f"`axis_name` must be the name of one axis of `mesh`, that of the stages, got "
            f"{axis_name!r}."
        )
    for argument, name in (("axis_name", axis_name), *(("data_axes", a) for a in data_axes)):
        if name not in mesh.shape:
            raise ValueError(
                f"`{argument}` {name!r} is not an axis of `mesh`, which has "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
    if axis_name in data_axes or len(set(data_axes)) < len(data_axes):
        raise ValueError(
            f"`data_axes` must be different axes, and not that of the stages, got {data_axes!r}."
        )
    if mesh.shape[axis_name] != schedule.num_stages:
        raise ValueError(
            f"`schedule` {schedule.name!r} has {schedule.num_stages} stages, and `mesh` "
            f"{mesh.shape[axis_name]} along axis {axis_name!r}: they must be as many."
        )
    if not isinstance(remat, bool | np.bool_):
        raise ValueError(
            "`remat` must be True or False, whether backward passes compute forward passes again, "
            f"got {remat!r}."
        )
    check_choice("batch_memory", batch_memory, BatchMemory)
    is_number = isinstance(gradient_scale, numbers.Real) and math.isfinite(gradient_scale)
    if not is_number or float(gradient_scale) <= 0:
        raise ValueError(f"`gradient_scale` must be a number above 0, got {gradient_scale!r}.")
