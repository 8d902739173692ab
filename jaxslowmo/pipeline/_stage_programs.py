"""The programs of a pipeline on the host, each on the mesh of its stage, and views of arrays there.

In the order of this file: meshes of stages; how arguments are sharded; operations; ends of a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import CompilerOptions, PyTree
from ..mesh import is_shared_leaf, position_key, restrict_spec
from ..tree import at_least_float32
from ._plan import Plan, StepReduction, Totals, all_gather_leaf
from .model import (
    LossTerms,
    local_microbatches,
    select_microbatch,
    split_microbatches,
    without_state,
)


@dataclass(frozen=True)
class BatchAxes:
    """The axes of a mesh over which the devices of a stage compute independently.

    Attributes:
      replicas: the axes of the replicas; () for one copy of the parameters, without a leading
        dimension.
      inner: axes inside a replica between whose devices the caller has split the batch.
      data_axes: axes inside a replica over which this pipeline splits each microbatch.
    """

    replicas: tuple[str, ...]
    inner: tuple[str, ...]
    data_axes: tuple[str, ...]

    @property
    def lead(self) -> tuple[str, ...]:
        """The axes of the leading dimension of a batch; () if there is one copy of it."""
        return (*self.replicas, *self.inner)

    @property
    def all(self) -> tuple[str, ...]:
        """All axes over which devices compute independently."""
        return (*self.lead, *self.data_axes)


class StageMeshes:
    """The meshes of all stages: each has the axes of the whole mesh, that of the stages of size 1.

    Args:
      plan: the pipeline.

    Raises:
      ValueError: devices of several processes.
    """

    def __init__(self, plan: Plan) -> None:
        mesh, self._axis_name = plan.mesh, plan.axis_name
        process = jax.process_index()
        if mesh.is_multi_process or any(d.process_index != process for d in mesh.devices.flat):
            raise ValueError(
                '`executor`="host" needs a `mesh` of devices of one process: use '
                '`executor`="one_program".'
            )
        # Axes inside of a stage are left to the compiler, whatever their types in the whole mesh.
        types = (AxisType.Auto,) * len(mesh.axis_names)
        self.whole = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        dim = mesh.axis_names.index(plan.axis_name)
        self.meshes = [
            Mesh(devices, mesh.axis_names, axis_types=types)
            for devices in np.split(mesh.devices, mesh.devices.shape[dim], axis=dim)
        ]

    def views(
        self, x: jax.Array | np.ndarray, spec: P, memory: str | None = None
    ) -> list[jax.Array]:
        """Return each stage's part of an array; the parts share the array's buffers.

        Args:
          x: an array; it is copied only if it is not yet placed as `spec` and `memory` require.
          spec: its sharding over the whole mesh.
          memory: its kind of memory; None: the memory of the devices.
        """
        placed: Any = jax.device_put(x, NamedSharding(self.whole, spec, memory_kind=memory))
        parts = {shard.device: shard.data for shard in placed.addressable_shards}
        names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        shape = [
            1 if self._axis_name in axes else size
            for size, axes in zip(placed.shape, [*names, *[()] * placed.ndim], strict=False)
        ]
        return [
            jax.make_array_from_single_device_arrays(
                tuple(shape),
                NamedSharding(mesh, spec, memory_kind=memory),
                [parts[device] for device in mesh.devices.flat],
            )
            for mesh in self.meshes
        ]

    def views_by_name(
        self, arrays: Mapping[str, Any], spec_of: Callable[[str], P]
    ) -> list[dict[str, jax.Array]]:
        """Return each stage's parts of arrays, by name; `spec_of(name)` is an array's sharding."""
        views = {name: self.views(x, spec_of(name)) for name, x in arrays.items()}
        return [{n: parts[i] for n, parts in views.items()} for i in range(len(self.meshes))]

    def join_stages(self, parts: Sequence[jax.Array], spec: P) -> jax.Array:
        """Return the array on the whole mesh with this sharding, from the parts on the stages."""
        dim = next(i for i, entry in enumerate(spec) if entry == self._axis_name)
        shape = list(parts[0].shape)
        shape[dim] = len(parts)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            tuple(shape), NamedSharding(self.whole, spec), shards
        )


class StageInputs(NamedTuple):
    """The arguments that all operations of a stage share.

    Attributes:
      weights: the leaves of the stage, whole over the data axes, one tree for each run of layers.
      batch: the whole batch, on the devices of the stage.
      keys: the words of one PRNG key for each part of the batch; None without keys.
    """

    weights: PyTree
    batch: PyTree
    keys: Any


@dataclass(frozen=True)
class Role:
    """The sharding of an argument or result of a program over a mesh.

    Attributes:
      spec: a prefix of its `PartitionSpec`.
      num_lead: number of leading dimensions that have size 1 on a device, and are dropped there.
    """

    spec: P
    num_lead: int

    def specs(self, tree: PyTree) -> Any:
        """Return the specs of the leaves of a value; those of a batch may be shared by its rows."""
        if self.num_lead or not any(map(is_shared_leaf, jax.tree.leaves(tree))):
            return self.spec
        return jax.tree.map(lambda x: P() if is_shared_leaf(x) else self.spec, tree)


SHARED = Role(P(), 0)


class HostSetting(NamedTuple):
    """The parameters of all programs of a pipeline.

    Attributes:
      plan: the plan of the pipeline.
      batch_axes: the axes over which devices compute independently.
      parts: number of parts of a batch, which go through the stages one after the other.
      key_impl: the implementation of typed PRNG keys; None for keys without a type.
      differentiates: whether to compute gradients.
      compiler_options: options for the compiler of the programs.
    """

    plan: Plan
    batch_axes: BatchAxes
    parts: int
    key_impl: str | None
    differentiates: bool
    compiler_options: CompilerOptions = ()

    @property
    def replica(self) -> Role:
        """The role of a value per replica and stage; one copy has no dimension of replicas."""
        return self._by_stage(self.batch_axes.replicas)

    @property
    def lead(self) -> Role:
        """The role of a value per stage and position over which the caller has split the batch."""
        return self._by_stage(self.batch_axes.lead)

    @property
    def device(self) -> Role:
        """The role of a value per device."""
        return Role(P(self.batch_axes.all, self.plan.axis_name), 2)

    @property
    def loss(self) -> Role:
        """The role of a value per position over which the caller has split the batch."""
        return Role(P(self.batch_axes.lead), 1) if self.batch_axes.lead else SHARED

    @property
    def batch(self) -> Role:
        """The role of a batch, whose rows are split over positions and replicated over stages."""
        return Role(P(self.batch_axes.lead), 0) if self.batch_axes.lead else SHARED

    def _by_stage(self, axes: tuple[str, ...]) -> Role:
        stage = self.plan.axis_name
        return Role(P(axes, stage), 2) if axes else Role(P(stage), 1)

    def of_buffer(self, name: str, role: Role, axes: Iterable[str]) -> Role:
        """Return the role of a buffer of the parameters that is sharded over `axes`."""
        spec = restrict_spec(self.plan.layout.specs[name][1:], frozenset(axes))
        return replace(role, spec=P(*role.spec, *spec))

    def shard_map(
        self, mesh: Mesh, fn: Callable[..., Any], ins: Any, outs: Any, **options: Any
    ) -> Any:
        """Return the compiled program that runs `fn` on the values of each device.

        Args:
          mesh: the mesh of one stage, or of all devices.
          fn: a function of as many arguments as there are `ins`.
          ins: a role for each argument, or a tree of roles.
          outs: the roles of the results.
          **options: keyword arguments of `jax.jit`.
        """

        def drop_lead(role: Role, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x.reshape(x.shape[role.num_lead :]), tree)

        def add_lead(role: Role, tree: PyTree) -> PyTree:
            ones = (1,) * role.num_lead
            return jax.tree.map(lambda x: x.reshape(*ones, *x.shape), tree)

        def per_device(*args: PyTree) -> PyTree:
            return jax.tree.map(add_lead, outs, fn(*jax.tree.map(drop_lead, ins, args)))

        # `check_vma=False`, so that layers work as on one device: with types of varying axes, a
        # loop in a layer could not start from constants.
        def program(*args: PyTree) -> PyTree:
            sharded = jax.shard_map(
                per_device,
                mesh=mesh,
                in_specs=jax.tree.map(lambda role, tree: role.specs(tree), ins, args),
                out_specs=jax.tree.map(lambda role: role.spec, outs),
                axis_names={*self.batch_axes.all, self.plan.axis_name},
                check_vma=False,
            )
            return sharded(*args)

        return jax.jit(program, compiler_options=dict(self.compiler_options), **options)

    def shardings(self, mesh: Mesh, role: Role, *, but: Iterable[str] = ()) -> Any:
        """Return the shardings of buffers like the parameters', whole over the axes `but`."""
        specs = self.plan.layout.specs
        axes = [name for name in mesh.axis_names if name not in but]
        return {n: NamedSharding(mesh, self.of_buffer(n, role, axes).spec) for n in specs}


class StagePrograms:
    """The programs of one stage of the model, F, B, W and BW, on the devices of its stage.

    Once per pass the program `weights` reads the leaves from the buffers, so that no operation
    copies them. It gathers them over the data axes; no other program has a collective over these
    axes or over replicas.

    Args:
      setting: the parameters of all programs.
      number: index of the stage of the model.
      mesh: the mesh of the stage.
    """

    def __init__(self, setting: HostSetting, number: int, mesh: Mesh) -> None:
        plan = setting.plan
        self._setting, self._plan, self._number = setting, plan, number
        self._kind = plan.kinds[plan.kind_index[number]]
        self._stage: Any = None  # F traces it, which is dispatched before B, W and BW
        data: Any = StageInputs(setting.replica, setting.batch, setting.batch)  # type: ignore[arg-type]
        device, compile_program = setting.device, partial(setting.shard_map, mesh)
        axes = setting.batch_axes.data_axes
        buffers = {n: setting.of_buffer(n, setting.replica, axes) for n in plan.layout.specs}
        self.weights = compile_program(
            self._weights, (buffers,), setting.replica, out_shardings=self._weight_shardings(mesh)
        )
        ins = data, SHARED, device, device
        self.forward = compile_program(self._forward, ins, device, donate_argnums=3)
        self.backward_input = compile_program(self._backward_input, ins, device)
        # Without this the compiler might choose another sharding of the sum for every program.
        pinned = setting.shardings(mesh, device, but=axes)
        self.backward_weight = compile_program(
            self._backward_weight, (*ins, device), device, donate_argnums=4, out_shardings=pinned
        )
        self.backward = compile_program(
            self._backward,
            (*ins, device),
            (device, device),
            donate_argnums=4,
            out_shardings=(None, pinned),
        )

    def _weights(self, buffers: dict[str, jax.Array]) -> PyTree:
        """Return the leaves of this stage; see `StageInputs`.

        Communication: one all-gather, over the data axes, of each buffer that is sharded there.
        """
        specs, axes = self._plan.layout.specs, frozenset(self._setting.batch_axes.data_axes)
        whole = {
            n: all_gather_leaf(x, restrict_spec(specs[n][1:], axes)) for n, x in buffers.items()
        }
        return self._kind.weights.read(whole, self._number)

    def _weight_shardings(self, mesh: Mesh) -> PyTree:
        """Return the shardings of these leaves over the axes that the compiler handles."""
        setting, segments = self._setting, self._kind.weights
        lead = setting.replica.spec
        inside = frozenset(mesh.axis_names) - set(setting.batch_axes.data_axes)
        specs = [P(*lead, *restrict_spec(place.leaf.spec, inside)) for place in segments.places]
        return segments.treedef.unflatten([NamedSharding(mesh, spec) for spec in specs])

    def _microbatch(self, data: StageInputs, number: jax.Array) -> PyTree:
        """Return microbatch `number`, counted over all parts, in the form that layers take."""
        plan, setting = self._plan, self._setting
        count, axes = plan.schedule.num_microbatches, setting.batch_axes.data_axes
        shares = {axis: plan.mesh.shape[axis] for axis in axes}
        batch = split_microbatches(data.batch, setting.parts * count, shares)
        batch = local_microbatches(batch, axes)
        part, index = number // count, number % count
        key = None
        if data.keys is not None:
            key = lax.dynamic_index_in_dim(data.keys.reshape(setting.parts, -1), part, 0, False)
            if setting.key_impl is not None:
                key = jax.random.wrap_key_data(key, impl=setting.key_impl)
            key = position_key(key, axes)
        # The key depends on the number within the part, the rows on the number within the batch.
        shift = jnp.int32(plan.shifts[self._number])
        return select_microbatch(batch, key, number, shift, key_number=index)

    def _forward(
        self, data: StageInputs, number: jax.Array, x: PyTree, states: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the stage's result, its stash, and the new model state."""
        kind, weights, microbatch = self._kind, data.weights, self._microbatch(data, number)
        x = kind.with_state(x, kind.states and kind.states.read(states, self._number))
        if self._setting.differentiates and self._stage is None:
            self._stage = self._plan.stage_program(kind, weights, x, microbatch)
        y, stash, after = kind.forward(self._stage, weights, x, microbatch)
        if kind.states is not None:
            states = kind.states.write(states, after, self._number)
        return y, stash, states

    def _backward_input(
        self, data: StageInputs, number: jax.Array, stash: PyTree, dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        weights, microbatch = data.weights, self._microbatch(data, number)
        dx, kept = self._stage.backward_input(weights, microbatch, stash, self._cotangent(dy))
        return self._cotangent_to_send(dx), kept

    def _backward_weight(
        self, data: StageInputs, number: jax.Array, stash: PyTree, kept: PyTree, total: PyTree
    ) -> PyTree:
        weights, microbatch = data.weights, self._microbatch(data, number)
        grads = self._stage.backward_weight(weights, microbatch, stash, kept)
        return self._kind.weights.accumulate(total, grads, self._number, in_place=False)

    def _backward(
        self, data: StageInputs, number: jax.Array, stash: PyTree, dy: PyTree, total: PyTree
    ) -> tuple[PyTree, PyTree]:
        weights, microbatch = data.weights, self._microbatch(data, number)
        dx, grads = self._stage.backward(weights, microbatch, stash, self._cotangent(dy))
        total = self._kind.weights.accumulate(total, grads, self._number, in_place=False)
        return self._cotangent_to_send(dx), total

    def _cotangent_to_send(self, dx: PyTree) -> PyTree:
        return None if self._kind.is_first else without_state(dx)

    def _cotangent(self, dy: PyTree) -> PyTree:
        return self._plan.cotangent(self._kind, self._stage, dy)


class StepPrograms:
    """The programs that run before the first operation of a pass, and after the last one.

    Attributes:
      device_states: one program per stage, which copies the model state to each device.
      zeros: one program per stage, which returns initial sums of gradients, in at least float32.

    Args:
      setting: the parameters of all programs.
      mesh: the mesh of all devices.
      meshes: the mesh of each device stage.
    """

    def __init__(self, setting: HostSetting, mesh: Mesh, meshes: Sequence[Mesh]) -> None:
        self._setting, self._mesh = setting, mesh
        axes = setting.batch_axes.data_axes
        self.zeros = [
            setting.shard_map(
                each,
                partial(_zeros, setting),
                (),
                setting.device,
                out_shardings=setting.shardings(each, setting.device, but=axes),
            )
            for each in meshes
        ]
        self.device_states = [
            setting.shard_map(each, lambda x: x, (setting.lead,), setting.device) for each in meshes
        ]
        self._reductions: dict[Any, Any] = {}

    def reduction(self, loss: LossTerms) -> Any:
        """Return the program that reduces the totals of all devices.

        Its results are the loss, the buffers of the model state, and the buffers of the
        gradients, {} without gradients.

        Args:
          loss: the last stage's result for a microbatch, which has the dtype of the loss.
        """
        dtype = loss.total.dtype
        if dtype not in self._reductions:
            self._reductions[dtype] = self._build_reduction(dtype)
        return self._reductions[dtype]

    def _build_reduction(self, dtype: Any) -> Any:
        setting, axes = self._setting, self._setting.batch_axes.data_axes
        outer = tuple(axis for axis in setting.plan.data_axes if axis in setting.batch_axes.lead)
        reduction = StepReduction(setting.plan, axes, outer)
        names = _floating(setting) if setting.differentiates else []

        def reduce_totals(totals: Totals) -> Any:
            loss = reduction.loss(totals.loss, dtype)
            grads = reduction.gradients(totals, loss.weight) if names else {}
            return loss, *jax.tree.map(lambda x: x[0], (reduction.states(totals), grads))

        roles = {n: setting.of_buffer(n, setting.lead, axes) for n in names}
        every = setting.shardings(self._mesh, setting.lead)
        pinned = {n: every[n] for n in every if n in roles}
        return setting.shard_map(
            self._mesh,
            reduce_totals,
            (setting.device,),
            (setting.loss, setting.lead, roles),
            out_shardings=(None, NamedSharding(self._mesh, setting.lead.spec), pinned),
        )


def _floating(setting: HostSetting) -> list[str]:
    """Return the names of the buffers that have gradients."""
    names = setting.plan.layout.specs
    return [n for n in names if jnp.issubdtype(jnp.dtype(n.partition("/")[0]), jnp.inexact)]


def _zeros(setting: HostSetting) -> dict[str, jax.Array | None]:
    """Return zeros as initial sums of gradients; None for integers, which have no gradients."""
    floating = _floating(setting)
    return {
        n: jnp.zeros(shape[1:], at_least_float32(n.partition("/")[0])) if n in floating else None
        for n, shape in setting.plan.layout.packing.shapes.items()
    }
