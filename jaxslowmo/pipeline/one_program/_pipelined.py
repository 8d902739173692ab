"""A pipeline of stages as one program, behind an ordinary loss function."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...mesh import varying_axes
from ...tree import Staged
from ..model import (
    LayeredModel,
    StageLayout,
    as_axes,
    call_signature,
    model_blocks,
    refuse_keys,
)
from ..partition import partition_by_bytes
from ..schedules import Schedule
from ._check import (
    BatchMemory,
    check_arguments,
    check_constant,
    check_not_mapped,
    only_once,
)
from ._data import in_microbatches, laid_out, microbatch_specs, only_over
from ._kinds import stage_kinds
from ._step import Plan, Step
from ._table import TickTable, forward_ticks, tick_table
from ._writing import writes_in_branches


def pipelined(
    model: LayeredModel,
    params: Sequence[PyTree],
    schedule: Schedule,
    *,
    parts: Sequence[Any] | None = None,
    mesh: Mesh,
    axis_name: str = "stage",
    data_axes: str | Sequence[str] = (),
    param_specs: PyTree | None = None,
    remat: bool = False,
    batch_memory: BatchMemory = "device",
    gradient_scale: float = 1.0,
    model_state: Sequence[PyTree] | None = None,
) -> "Pipelined":
    """One program on all devices that runs a model as a pipeline of stages.

        pipe = js.pipelined(model, params, js.schedules.one_f_one_b(4, 16), mesh=mesh)
        step = js.make_train_step(
            pipe.loss_fn,
            optimizer,
            sync=js.slowmo("replica", param_specs=pipe.layout.specs),
            mesh=mesh,
        )
        state = step.init(pipe.layout.stack(params))

    `pipe.loss_fn` scans over the schedule's table of ticks, which is data: the program does not
    grow with the number of microbatches. In each tick a device computes what the table says of its
    stage, in one branch of a `lax.switch`, or nothing; what stages send each other travels outside
    of all branches. Every tick lasts as long as its longest operation on any stage, so choose the
    schedule by its bubble in lockstep (`schedule.simulate(lockstep=True)`).

    Args:
      model: layers and loss. As in all that `shard_map` maps, a loop inside of a layer begins with
        what its input gives, `jnp.zeros_like(x[0])`, not with `jnp.zeros(...)`.
      params: one tree per layer, arrays or `ShapeDtypeStruct`s; shapes and dtypes alone count.
      schedule: which stage computes what when; of as many stages as `mesh` has along `axis_name`.
      parts: layers of each stage, as `js.partition_uniform` and its kin return them; None: such
        that the stage with the most bytes of parameters has as few as can be.
      mesh: devices; axes other than `axis_name` and `data_axes` (replicas, tensor parallel) are
        left to whoever maps them outside, or to the compiler.
      axis_name: of the stages.
      data_axes: axes inside a replica between whose devices each microbatch is split. Parameters
        that `param_specs` shards over them are gathered before the scan, and their gradients
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
      A `Pipelined`.

    Raises:
      ValueError: a schedule of other stages than the mesh, unknown axes, parts that do not cover
        the layers, a stage without layers, tied leaves with unlike specs. When the loss function is
        traced: batches that microbatches or data axes don't divide, activations whose structure,
        shapes or dtypes differ between stages.

    Communication: per tick, over `axis_name`, one collective-permute of one activation and one of
      its cotangent between neighbours (two of each for a placement that goes down the stages and
      back up); at the end of a step one all-reduce of loss and metrics, and what
      `js.sum_tied_gradients` states of tied parameters. Over `data_axes` one all-gather and one
      reduce-scatter of each sharded slot, one all-reduce of the gradients of the others. A
      collective that the compiler puts inside of a branch, for axes left to it, runs between the
      devices of one stage alone.
    """
    data_axes = as_axes(data_axes)
    check_arguments(model, schedule, mesh, axis_name, data_axes, gradient_scale, batch_memory)
    model.check_params(params)
    refuse_keys(params)
    stages, chunks = schedule.num_stages, schedule.num_chunks
    if parts is None:
        parts = partition_by_bytes(params, stages, chunks)
    blocks = model_blocks(len(model.layers), stages, chunks, parts)
    lies: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
    places = blocks, schedule.placement
    state_layout, states = None, None
    if model.takes_state:
        states = model.checked_state(model_state)
    layout = StageLayout(model, params, *places, param_specs=param_specs, beside=states, **lies)
    if states is not None:
        untied = LayeredModel(model.layers, model.loss)
        state_layout = StageLayout(untied, states, *places, runs=layout.all_runs, **lies)
    kinds, of_stage = stage_kinds(model, layout, state_layout)
    plan = Plan(
        model=model,
        layout=layout,
        state_layout=state_layout,
        kinds=kinds,
        of_stage=of_stage,
        shifts=np.array([b.start for b in blocks]) - np.array([kinds[i].start for i in of_stage]),
        tied=layout.tied_places(),
        axis_name=axis_name,
        num_microbatches=schedule.num_microbatches,
        remat=remat,
        gradient_scale=gradient_scale,
        in_branches=writes_in_branches(mesh),
    )
    return Pipelined(plan, schedule, mesh, data_axes, batch_memory)


class Pipelined:
    """A pipeline as one program; made by `js.pipelined`.

    Attributes:
      layout: of its parameters; `layout.stack(params)` is what `loss_fn` takes.
      state_layout: of the model state of its layers; None for models without.
      schedule: which stage computes what when.
      model: the layers.
      mesh: of the devices.
      data_axes: axes over which each microbatch is split.
      remat: whether forward passes are computed again in the backward pass.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        mesh: Mesh,
        data_axes: tuple[str, ...],
        batch_memory: BatchMemory,
    ) -> None:
        self.layout: StageLayout = plan.layout
        self.state_layout: StageLayout | None = plan.state_layout
        self.schedule, self.model, self.remat = schedule, plan.model, plan.remat
        self.mesh, self.data_axes, self._plan = mesh, data_axes, plan
        self._batch_memory = batch_memory
        self._table = None if schedule.forward_only else tick_table(schedule)
        self._forward_table = tick_table(schedule, forward_ticks(schedule))
        self._run = jax.custom_vjp(self._evaluated)
        # So that it is known of what gradients are wanted.
        self.__signature__ = call_signature(type(self).__call__, plan.model.takes_state)
        self._run.defvjp(self._differentiated, self._pulled_back, symbolic_zeros=True)

    @property
    def loss_fn(self) -> "Pipelined":
        """The loss function, which this is: `pipe.loss_fn(stacked, batch)`."""
        return self

    def params_form(self, params: PyTree) -> PyTree:
        """Return parameters as the loss function takes them.

        Args:
          params: one tree per layer, which are stacked; or what `layout.stack` made of them.
        """
        return params if isinstance(params, Staged) else self.layout.stack(params)

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return model state as the loss function takes it: one tree per layer is stacked."""
        if self.state_layout is None or not isinstance(model_state, list | tuple):
            return model_state
        self.model.checked_state(model_state)
        return self.state_layout.stack(model_state)

    def __call__(
        self, stacked: PyTree, batch: PyTree, *, rng: Any = None, model_state: PyTree = None
    ) -> Any:
        """The loss of a batch: an ordinary function for `jax.grad` and `js.make_train_step`.

        Differentiated, it runs the schedule once, whose backward passes give the gradients; else
        forward passes alone. Gradients are accumulated in float32 and are those of the mean over
        the microbatches.

        Args:
          stacked: parameters as `layout.stack` makes them, or one replica's of those.
          batch: arrays whose leading dimension counts the examples of the replica. Scalars, and
            arrays whose leading dimension is 1, are shared by all examples.
          rng: the key of layers that take one: each layer of each microbatch draws from its own,
            `fold_in(fold_in(rng, microbatch), layer)`, forward and backward; before that the
            positions along `data_axes` are folded in. None: layers get None.
          model_state: of models whose layers take `state`: what `model_state_form` returns, or an
            earlier call. Each layer's goes on from microbatch to microbatch, in the order in which
            the schedule computes them; at the end floating leaves are averaged over `data_axes`.

        Returns:
          The loss, or (loss, metrics), means over the microbatches, or quotients of sums over them
          where the model's loss is a pair; metrics are float32. They have no gradient, and their
          cotangents are ignored. With model state (loss, (metrics, new model state)).

        Raises:
          ValueError: see `js.pipelined`; gradients of the batch are asked for, or second
            derivatives of a model with tied leaves.
        """
        if not isinstance(stacked, Staged) or stacked.packing != self.layout.packing:
            is_other = isinstance(stacked, Staged)
            raise ValueError(
                "`stacked` must be parameters as `layout.stack(params)` makes them, got "
                f"{'those of another layout' if is_other else type(stacked).__name__}."
            )
        for name, shape in self.layout.packing.shapes.items():
            if jnp.shape(stacked[name]) != shape:
                raise ValueError(
                    f"`stacked` must have buffers of (stages, ..., elements), {list(shape)} at "
                    f"{name!r}, got {list(jnp.shape(stacked[name]))}."
                )
        model, states = self._plan.model, {}
        if self.state_layout is not None:
            states = _checked_state(self.state_layout, model_state)
        run = self._run(stacked, states, batch, rng if model.takes_key else None)
        value, after = run
        if self.state_layout is None:
            return value
        loss, metrics = value if isinstance(value, tuple) else (value, {})
        return loss, (metrics, self.state_layout.packing.staged(after))

    def _evaluated(self, stacked: PyTree, states: PyTree, batch: PyTree, rng: Any) -> Any:
        return self._mapped(stacked, states, batch, rng, self._forward_table, differentiates=False)[
            0
        ]

    def _differentiated(self, *primals: PyTree) -> tuple[Any, PyTree]:
        check_constant(primals[2])
        stacked, states, batch, rng = jax.tree.map(lambda x: x.value, primals)
        if self._plan.tied:
            stacked = only_once(stacked)
        if self._table is None:
            raise ValueError(
                f"`schedule` {self.schedule.name!r} has forward passes alone, so there are no "
                "gradients of this pipeline."
            )
        return self._mapped(stacked, states, batch, rng, self._table, differentiates=True)

    def _pulled_back(self, grads: PyTree, cotangent: Any) -> tuple[PyTree, None, None, None]:
        value, _ = cotangent
        of_loss: Any = value[0] if isinstance(value, tuple) else value
        if isinstance(of_loss, jax.custom_derivatives.SymbolicZero):  # of metrics alone
            of_loss = jnp.zeros((), jnp.float32)

        def scaled(g: Any) -> Any:
            if g.dtype == jax.dtypes.float0:
                return g
            wide = jnp.promote_types(g.dtype, jnp.float32)
            return (g.astype(wide) * of_loss.astype(wide)).astype(g.dtype)

        return jax.tree.map(scaled, grads), None, None, None

    def _mapped(
        self,
        stacked: PyTree,
        states: PyTree,
        batch: PyTree,
        rng: Any,
        table: TickTable,
        *,
        differentiates: bool,
    ) -> tuple[Any, PyTree]:
        """Loss with model state, and gradients, from outside of the stages."""
        context, axis_name = jax.sharding.get_abstract_mesh(), self._plan.axis_name
        manual = frozenset(context.manual_axes)
        if self.schedule.num_stages > 1:
            check_not_mapped(axis_name, manual)
        # Between devices along an axis that is mapped already the caller has split the batch.
        data_axes = tuple(a for a in self.data_axes if a not in manual)
        outer_axes = tuple(a for a in self.data_axes if a in manual)
        shares = {a: self.mesh.shape[a] for a in data_axes}
        microbatches = in_microbatches(batch, self._plan.num_microbatches, shares)
        if self._batch_memory == "host":
            microbatches = jax.device_put(microbatches, jax.memory.Space.Host)
        own = tuple(a for a in (axis_name, *data_axes) if a not in manual)
        specs = {name: only_over(spec, own) for name, spec in self.layout.specs.items()}
        of_grads = {
            name: spec
            for name, spec in specs.items()
            if differentiates and jnp.issubdtype(stacked[name].dtype, jnp.inexact)
        }
        given = stacked.buffers, states, microbatches, rng
        axes = {axis_name, *own}.union(*map(varying_axes, jax.tree.leaves(given)))
        mesh = self.mesh if context.empty else context
        step = Step(self._plan, table, data_axes, outer_axes, tuple(sorted(axes)), differentiates)
        of_batch = microbatch_specs(microbatches, data_axes)
        of_states = P(axis_name) if axis_name in own else P()
        mapped: Any = step
        if own:  # not mapped already, as an axis of one stage may be
            mapped = jax.shard_map(
                step,
                mesh=mesh,
                axis_names=set(own),
                in_specs=(specs, of_states, of_batch, P()),
                out_specs=(P(), of_states, of_grads),
            )
        microbatches = laid_out(microbatches, of_batch, mesh)
        value, after, grads = mapped(stacked.buffers, states, microbatches, rng)
        none = {n: np.zeros(x.shape, jax.dtypes.float0) for n, x in stacked.items()}
        return (value, after), self.layout.packing.staged({**none, **grads})


def _checked_state(layout: StageLayout, model_state: Any) -> dict[str, Any]:
    """The buffers of a model state, as `state_layout.stack` made them."""
    if not isinstance(model_state, Staged) or model_state.packing != layout.packing:
        raise ValueError(
            "`model_state` must be what `pipe.model_state_form(trees)` makes of one tree per "
            f"layer, got {type(model_state).__name__}."
        )
    return model_state.buffers
