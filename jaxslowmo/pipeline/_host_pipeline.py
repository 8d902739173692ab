"""A pipeline whose operations are separate programs, which the host dispatches in order."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._support.types import CompilerOptions, PyTree
from ..tree import Staged, WeightedSum, at_least_float32, type_text
from ._pipelined import Pipelined
from ._plan import Plan, Totals
from ._stage_programs import (
    SHARED,
    BatchAxes,
    HostSetting,
    StageInputs,
    StageMeshes,
    StagePrograms,
    StepPrograms,
)
from ._tick_table import forward_ticks
from .model import Loss, LossTerms
from .schedules import Operation, Schedule, Tick

# The number of ticks that may be dispatched and unfinished. The host must be ahead of the devices,
# so that they do not wait for it; but each tick ahead holds arrays beyond what the schedule needs.
_TICKS_AHEAD = 4

_ByStage = dict[tuple[int, int], PyTree]  # maps (stage of the model, microbatch) to arrays


@dataclass
class Pass:
    """One pass of all microbatches through the stages.

    This object holds the only references to intermediate arrays. It drops an array as soon as the
    last operation that needs it has been dispatched.

    Attributes:
      schedule: the order of the operations.
      programs: the programs of each stage of the model.
      data: the arguments that all operations of each stage of the model share.
      numbers: per device stage, the numbers of this pass's microbatches, on its devices.
      arrivals: per device stage, the sharding of activations that are sent to it.
      totals: per device stage, the sums of its gradients; changed by `run`.
      states: per device stage, the model state of its layers; changed by `run`.
      results: maps each microbatch to the result of the last stage.
    """

    schedule: Schedule
    programs: Sequence[StagePrograms]
    data: Sequence[StageInputs]
    numbers: Sequence[Sequence[jax.Array]]
    arrivals: Sequence[NamedSharding]
    totals: list[PyTree]
    states: list[PyTree]
    results: dict[int, PyTree] = field(default_factory=dict)
    _x: _ByStage = field(default_factory=dict)
    _stash: _ByStage = field(default_factory=dict)
    _dy: _ByStage = field(default_factory=dict)
    _kept: _ByStage = field(default_factory=dict)

    def run(self, ticks: Sequence[Tick]) -> None:
        """Dispatch the operations of all ticks; return before the last ones are finished."""
        in_flight: deque[list[jax.Array]] = deque()
        for tick in ticks:
            if len(in_flight) == _TICKS_AHEAD:
                jax.block_until_ready(in_flight.popleft())
            outputs = [self._dispatch(operation) for cell in tick for operation in cell]
            in_flight.append([x for x in outputs if x is not None])

    def _dispatch(self, operation: Operation) -> jax.Array | None:
        """Dispatch one operation; return one of its outputs, to wait for."""
        k, m = self.schedule.model_stage(operation), operation.microbatch
        run = {
            "F": self._forward,
            "B": self._backward_input,
            "BW": self._backward,
            "W": self._backward_weight,
        }[operation.kind]
        return next(iter(jax.tree.leaves(run(k, m))), None)

    def _inputs(self, k: int, m: int) -> tuple[StageInputs, jax.Array]:
        return self.data[k], self.numbers[self.schedule.placement[k]][m]

    def _forward(self, k: int, m: int) -> PyTree:
        stage = self.schedule.placement[k]
        y, self._stash[k, m], self.states[stage] = self.programs[k].forward(
            *self._inputs(k, m), self._x.pop((k, m), None), self.states[stage]
        )
        if k + 1 < len(self.programs):
            self._x[k + 1, m] = self._send(y, k + 1)
        else:
            self.results[m] = y
        return y

    def _backward_input(self, k: int, m: int) -> PyTree:
        dx, self._kept[k, m] = self.programs[k].backward_input(
            *self._inputs(k, m), self._stash[k, m], self._dy.pop((k, m), None)
        )
        self._send_back(k, m, dx)
        return dx, self._kept[k, m]

    def _backward_weight(self, k: int, m: int) -> None:
        stage = self.schedule.placement[k]
        self.totals[stage] = self.programs[k].backward_weight(
            *self._inputs(k, m), self._stash.pop((k, m)), self._kept.pop((k, m)), self.totals[stage]
        )

    def _backward(self, k: int, m: int) -> PyTree:
        stage = self.schedule.placement[k]
        dx, self.totals[stage] = self.programs[k].backward(
            *self._inputs(k, m),
            self._stash.pop((k, m)),
            self._dy.pop((k, m), None),
            self.totals[stage],
        )
        self._send_back(k, m, dx)
        return dx

    def _send_back(self, k: int, m: int, dx: PyTree) -> None:
        if k:
            self._dy[k - 1, m] = self._send(dx, k - 1)

    def _send(self, tree: PyTree, k: int) -> PyTree:
        return jax.device_put(tree, self.arrivals[self.schedule.placement[k]])


class Results(NamedTuple):
    """The results of `HostPipeline.dispatch`, which the loss function takes in place of a batch.

    Every leaf has a leading dimension of positions, over replicas and the axes inside a replica
    between whose devices the batch was split.

    Attributes:
      loss: the loss and the metrics of all microbatches.
      states: the buffers of the new model state; {} for models without.
      grads: the buffers of the gradients of the floating parameters; None if no gradients were
        requested.
    """

    loss: Loss
    states: dict[str, Any]
    grads: dict[str, Any] | None


class HostPipeline(Pipelined):
    """A pipeline whose operations are separate programs, which one process dispatches.

    `js.pipelined(..., executor="host")` makes it. Each stage of the model has one compiled program
    per operation, for the devices at the stage's index along the stage axis of the mesh. Operations
    that do not depend on each other run at the same time, and no stage waits for others at the end
    of a tick. Parameters, model state, batches and gradients are on the whole mesh; a stage's
    programs use their buffers without copies.

    A step of `js.make_train_step` calls `dispatch` outside of its programs, which take the results
    in place of the batch.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._stages = StageMeshes(plan)
        self._executions: dict[Any, Execution] = {}

    def execute(
        self, stacked: Staged, states: PyTree, batch: PyTree, rng: Any, *, differentiates: bool
    ) -> tuple[tuple[Loss, dict[str, Any]], dict[str, Any]]:
        """Dispatch the schedule, or unpack `Results`; see `Pipelined.execute`."""
        if isinstance(batch, Results):
            results = jax.tree.map(lambda x: x[0], batch)  # the results of this position
        else:
            arguments = stacked, states, batch, rng
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
                raise ValueError(
                    '`executor`="host" dispatches programs, so this pipeline cannot be called '
                    'inside of jax.jit, jax.vmap and the like: use `executor`="one_program".'
                )
            keys = None if rng is None else rng[None]
            batch_axes = BatchAxes((), (), self.data_axes)
            execution, arguments = self._prepare(
                batch_axes, stacked, batch, keys, states, 1, differentiates
            )
            results = execution.run(*arguments)
        return (results.loss, results.states), results.grads or {}

    def check_mesh(self, mesh: Any) -> None:
        """Raise `ValueError` unless `mesh` is the mesh of this pipeline."""
        if mesh != self.mesh:
            raise ValueError(
                f"`mesh` must be that of the pipeline in `loss_fn`, {dict(self.mesh.shape)}, got "
                f"{dict(mesh.shape)} or other devices."
            )

    def dispatch(
        self,
        params: Staged,
        batch: PyTree,
        *,
        rng: Any,
        model_state: PyTree,
        replicas: tuple[str, ...],
        inner_axes: tuple[str, ...],
        parts: int,
        differentiates: bool,
        compiler_options: CompilerOptions = (),
        runs: bool = True,
    ) -> Results:
        """Run the stages for all replicas; return the loss function's substitute for a batch.

        Args:
          params: stacked parameters, leaves (replicas, *s).
          batch: leaves (positions * rows, ...), positions over replicas and `inner_axes`.
          rng: (positions, parts) typed PRNG keys.
          model_state: leaves (positions, *s).
          replicas: the axes of the replicas.
          inner_axes: axes inside a replica between whose devices the batch is split.
          parts: number of parts into which the rows of a position are divided. They go through the
            stages one after the other, and their gradients are averaged.
          differentiates: whether to compute gradients.
          compiler_options: options for the compiler of the programs.
          runs: whether to run; if False, arguments may be types, and types are returned.

        Raises:
          ValueError: gradients are requested of a schedule without backward passes; see
            `js.pipelined`.
        """
        if differentiates:
            self.check_has_backward()
        data_axes = tuple(axis for axis in self.data_axes if axis not in inner_axes)
        states = {} if self.state_layout is None else model_state.buffers
        keys = rng if self.model.takes_key else None
        batch_axes = BatchAxes(replicas, inner_axes, data_axes)
        with jax.set_mesh(None):  # each program has the mesh of its stage
            execution, arguments = self._prepare(
                batch_axes, params, batch, keys, states, parts, differentiates, compiler_options
            )
            return execution.run(*arguments) if runs else execution.types(*arguments)

    def _prepare(
        self,
        batch_axes: BatchAxes,
        stacked: Staged,
        batch: PyTree,
        keys: Any,
        states: dict[str, Any],
        parts: int,
        differentiates: bool,
        compiler_options: CompilerOptions = (),
    ) -> tuple["Execution", tuple[Any, ...]]:
        """Return the programs for arguments of these types, and the arguments of their dispatch."""
        impl = None
        if keys is not None and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            impl, keys = _impl_and_words(keys)
        setting = HostSetting(self.plan, batch_axes, parts, impl, differentiates, compiler_options)
        types = jax.tree.map(type_text, (stacked.buffers, batch, keys, states))
        key = *setting[1:], str(types)
        if key not in self._executions:
            self._executions[key] = Execution(setting, self._stages)
        return self._executions[key], (stacked.buffers, batch, keys, states)


def _impl_and_words(keys: Any) -> tuple[str, Any]:
    """Return the implementation of typed keys and their words, or the type of the words."""
    names: list[str] = []

    def words(keys: Any) -> Any:
        names.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    is_type = isinstance(keys, jax.ShapeDtypeStruct)
    data = jax.eval_shape(words, keys) if is_type else words(keys)
    return names[0], data


class Execution:
    """The programs of a pipeline for arguments of certain types, and their dispatch.

    Args:
      setting: the parameters of all programs.
      stages: the meshes of the stages.
    """

    def __init__(self, setting: HostSetting, stages: StageMeshes) -> None:
        self._setting, self._stages = setting, stages
        plan = setting.plan
        self._schedule = schedule = plan.schedule
        self._ticks = schedule.ticks() if setting.differentiates else forward_ticks(schedule)
        self._programs = [
            StagePrograms(setting, k, stages.meshes[stage])
            for k, stage in enumerate(self._schedule.placement)
        ]
        self._step = StepPrograms(setting, stages.whole, stages.meshes)
        count = setting.parts * self._schedule.num_microbatches
        # A Python number would be copied to all devices of a stage at each operation.
        self._numbers = [
            [_device_put(mesh, SHARED.spec, np.int32(i)) for i in range(count)]
            for mesh in stages.meshes
        ]
        self._arrivals = [NamedSharding(mesh, setting.device.spec) for mesh in stages.meshes]

    def run(self, buffers: Any, batch: PyTree, keys: Any, states: dict[str, Any]) -> Results:
        """Dispatch all microbatches of all parts; return when the last ones are dispatched."""
        data, parts = self._stage_inputs(buffers, batch, keys), self._setting.parts
        results = self._finish_pass(self._dispatch_pass(data, states, 0))
        if parts == 1:
            return results
        total = _weighted_sums(results)
        for part in range(1, parts):
            results = self._finish_pass(self._dispatch_pass(data, results.states, part))
            total = _add(total, _weighted_sums(results))
        # Average over the parts, like a step with `accumulate`; model state is that of the last.
        return _mean(total, results._replace(states={}))._replace(states=results.states)

    def types(self, buffers: Any, batch: PyTree, keys: Any, states: dict[str, Any]) -> Results:
        """Return the types of the result of `run`, from its arguments or their types."""
        stage_buffers = {n: _one_stage_type(x, self._setting.replica) for n, x in buffers.items()}
        x: Any = None
        after = {n: _one_stage_type(s, self._setting.lead) for n, s in states.items()}
        after = jax.eval_shape(self._step.device_states[0], after)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        for program in self._programs:
            data = StageInputs(jax.eval_shape(program.weights, stage_buffers), batch, keys)
            x, _, after = jax.eval_shape(program.forward, data, number, x, after)
        terms: Any = x
        zeros = jax.eval_shape(self._step.zeros[0]) if self._setting.differentiates else {}
        totals = Totals(jax.eval_shape(_sum_terms, [terms]), zeros, after)
        count = self._schedule.num_stages
        totals = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], count, *x.shape[2:]), x.dtype), totals
        )
        loss, new_states, grads = jax.eval_shape(self._step.reduction(terms), totals)
        results = Results(loss, new_states, grads if self._setting.differentiates else None)
        if self._setting.parts > 1:
            terms = jax.eval_shape(_weighted_sums, results)
            mean = jax.eval_shape(_mean, terms, results._replace(states={}))
            results = mean._replace(states=results.states)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            results,
            self._shardings(results),
        )

    def _shardings(self, results: Results) -> Results:
        """Return the shardings of results on the mesh of the pipeline."""
        setting, mesh = self._setting, self._setting.plan.mesh

        def shardings_for(tree: PyTree, spec: PartitionSpec) -> PyTree:
            return jax.tree.map(lambda _: NamedSharding(mesh, spec), tree)

        every = setting.shardings(mesh, setting.lead)
        grads = results.grads and {n: every[n] for n in results.grads}
        loss = shardings_for(results.loss, setting.loss.spec)
        return Results(loss, shardings_for(results.states, setting.lead.spec), grads)

    def _stage_inputs(self, buffers: Any, batch: PyTree, keys: Any) -> list[StageInputs]:
        """Return the arguments that all operations of each stage of the model share."""
        setting = self._setting
        shardings = setting.shardings(self._stages.whole, setting.replica)
        views = self._stages.views_by_name(buffers, lambda name: shardings[name].spec)
        leaves, structure = jax.tree.flatten(batch)
        memory = "pinned_host" if setting.plan.batch_memory == "host" else None
        rows = [self._stages.views(x, setting.batch.specs(x), memory) for x in leaves]
        words: list[Any] = [None] * len(views)
        if keys is not None:
            words = self._stages.views(keys, setting.batch.spec)
        return [
            StageInputs(
                program.weights(views[stage]),
                structure.unflatten([x[stage] for x in rows]),
                words[stage],
            )
            for program, stage in zip(self._programs, self._schedule.placement, strict=True)
        ]

    def _dispatch_pass(
        self, data: Sequence[StageInputs], states: dict[str, Any], part: int
    ) -> Pass:
        """Dispatch the microbatches of one part of the batch."""
        setting, count = self._setting, self._schedule.num_microbatches
        views = self._stages.views_by_name(states, lambda _: setting.lead.spec)
        programs = zip(self._step.device_states, views, strict=True)
        totals: list[Any] = [{} for _ in views]
        if setting.differentiates:
            totals = [program() for program in self._step.zeros]
        one_pass = Pass(
            self._schedule,
            self._programs,
            data,
            [numbers[part * count : (part + 1) * count] for numbers in self._numbers],
            self._arrivals,
            totals,
            [program(view) if view else view for program, view in programs],
        )
        one_pass.run(self._ticks)
        return one_pass

    def _finish_pass(self, one_pass: Pass) -> Results:
        """Return the results of one part of the batch, from its sums on the stages."""
        setting, last = self._setting, self._schedule.placement[-1]
        every = [one_pass.results[m] for m in sorted(one_pass.results)]
        terms = _sum_terms(every)
        spec = setting.device.spec
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), terms)
        losses = [
            terms if stage == last else _device_put(mesh, spec, zeros)
            for stage, mesh in enumerate(self._stages.meshes)
        ]
        loss = jax.tree.map(lambda *parts: self._stages.join_stages(parts, spec), *losses)
        axes = setting.batch_axes.data_axes
        shardings = setting.shardings(self._stages.whole, setting.device, but=axes)
        grads = {
            name: self._stages.join_stages([t[name] for t in one_pass.totals], shardings[name].spec)
            for name, x in one_pass.totals[0].items()
            if x is not None
        }
        states = {
            name: self._stages.join_stages([buffers[name] for buffers in one_pass.states], spec)
            for name in one_pass.states[0]
        }
        totals = Totals(loss, grads, states)
        loss, new_states, grads = self._step.reduction(every[0])(totals)
        results = Results(loss, new_states, grads if setting.differentiates else None)
        if AxisType.Explicit in setting.plan.mesh.axis_types:
            # Move nothing, but give results types with shardings on the mesh of the step's program.
            placed = jax.device_put(results, self._shardings(results))
            if not setting.batch_axes.lead:
                # Outside of jit, `jax.grad` starts from a cotangent without a mesh, and jax 0.10
                # and 0.12 refuse to multiply it with gradients on this mesh.
                loss = jax.tree.map(lambda x: x.addressable_data(0), results.loss)
                return placed._replace(loss=loss)
            results = placed
        return results


def _device_put(mesh: Any, spec: PartitionSpec, tree: PyTree) -> PyTree:
    return jax.device_put(tree, NamedSharding(mesh, spec))


def _one_stage_type(x: Any, role: Any) -> jax.ShapeDtypeStruct:
    """Return the type of one stage's part of an array; stages are the last leading dimension."""
    dim = role.num_lead - 1
    return jax.ShapeDtypeStruct((*x.shape[:dim], 1, *x.shape[dim + 1 :]), x.dtype)


@jax.jit
def _sum_terms(every: list[LossTerms]) -> LossTerms:
    def total(*parts: jax.Array) -> jax.Array:
        wide = [x.astype(at_least_float32(x.dtype)) for x in parts]
        return sum(wide[1:], start=wide[0])

    return jax.tree.map(total, *every)


@jax.jit
def _weighted_sums(results: Results) -> tuple[WeightedSum, WeightedSum]:
    """Return what a part adds to sums: loss and gradients with the loss' weight, and metrics."""
    loss = results.loss
    of_loss = WeightedSum.from_value((loss.value, results.grads), loss.weight)
    return of_loss, WeightedSum.from_value(loss.metrics)


@jax.jit
def _add(total: PyTree, terms: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, terms)


@jax.jit
def _mean(total: tuple[WeightedSum, WeightedSum], last: Results) -> Results:
    """Return means over the parts from their sums, in the dtypes of `last`; metrics stay wide."""
    of_loss, metrics = total
    like = last.loss.value, last.grads
    value, grads = jax.tree.map(lambda mean, x: mean.astype(x.dtype), of_loss.mean, like)
    weight = None if last.loss.weight is None else of_loss.weight
    loss = last.loss._replace(value=value, weight=weight, metrics=metrics.mean)
    return last._replace(loss=loss, grads=grads)
