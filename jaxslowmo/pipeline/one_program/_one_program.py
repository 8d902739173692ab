"""`OneProgram`, a pipeline that runs all stages as one program."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import only_over, place_key
from ...tree import Staged
from .._pipelined import Pipelined, in_microbatches, microbatch_specs
from .._plan import Ending, Plan, gathered
from ..model import Loss, LossTerms, without_state
from ._scan import Activations, Device, Scan
from ._tick_table import Half, TickTable, forward_ticks, nothing, tick_table, writes_in_branches


class OneProgram(Pipelined):
    """A pipeline that runs as one program, a scan over the table of its schedule."""

    @cached_property
    def _table(self) -> TickTable:
        return tick_table(self.schedule)

    @cached_property
    def _forward_table(self) -> TickTable:
        return tick_table(self.schedule, forward_ticks(self.schedule))

    def execute(
        self, stacked: Staged, states: PyTree, batch: PyTree, rng: Any, *, differentiates: bool
    ) -> tuple[tuple[Loss, dict[str, Any]], dict[str, Any]]:
        """Map one step over the stages and the data axes; see `Pipelined.execute`."""
        plan, table = self.plan, self._table if differentiates else self._forward_table
        context, axis_name = jax.sharding.get_abstract_mesh(), plan.axis_name
        manual = frozenset(context.manual_axes)
        if self.schedule.num_stages > 1 and axis_name in manual:
            raise ValueError(
                f"`axis_name` {axis_name!r} is mapped already where the loss function of this "
                "pipeline is called, which maps the stages itself. In a step of js.make_train_step "
                "it stays free if the state's parameters are placed as `layout.stack` places them."
            )
        # If a data axis is mapped already, the caller has split the batch over it.
        data_axes = tuple(a for a in self.data_axes if a not in manual)
        outer_axes = tuple(a for a in self.data_axes if a in manual)
        shares = {a: self.mesh.shape[a] for a in data_axes}
        microbatches = in_microbatches(batch, self.schedule.num_microbatches, shares)
        if plan.batch_memory == "host":
            microbatches = jax.device_put(microbatches, jax.memory.Space.Host)
        new_axes = frozenset(a for a in (axis_name, *data_axes) if a not in manual)
        specs = {name: only_over(spec, new_axes) for name, spec in self.layout.specs.items()}
        of_grads = {
            name: spec
            for name, spec in specs.items()
            if differentiates and jnp.issubdtype(stacked[name].dtype, jnp.inexact)
        }
        mesh = self.mesh if context.empty else context
        ending = Ending(plan, data_axes, outer_axes)
        step: Any = OneProgramStep(plan, table, ending, differentiates)
        of_batch = microbatch_specs(microbatches, data_axes)
        of_states = P(axis_name) if axis_name in new_axes else P()
        if new_axes:  # empty if all are mapped already, which an axis of one stage may be
            step = jax.shard_map(
                step,
                mesh=mesh,
                axis_names=new_axes,
                in_specs=(specs, of_states, of_batch, P()),
                out_specs=(P(), of_states, of_grads),
                check_vma=False,
            )
        if context.empty:  # outside of jit, `shard_map` can only map all axes of a mesh
            step = jax.jit(step)
        microbatches = _laid_out(microbatches, of_batch, mesh)
        loss, after, grads = step(stacked.buffers, states, microbatches, rng)
        return (loss, after), grads


@dataclass(frozen=True)
class OneProgramStep:
    """The function that computes loss and gradients, to be mapped over stages and data axes.

    Attributes:
      plan: the plan of the pipeline.
      table: the operations of each device stage in each tick.
      ending: the reductions at the end of the step.
      differentiates: whether to compute gradients.
    """

    plan: Plan
    table: TickTable
    ending: Ending
    differentiates: bool

    def __call__(
        self, buffers: dict[str, Any], states: dict[str, Any], batch: PyTree, rng: Any
    ) -> tuple[Loss, dict[str, Any], dict[str, Any]]:
        """Return the loss, equal on all devices, and a stage's model state and gradients."""
        device = self._device(buffers, states, batch, rng)
        scan = self._scan(device)
        totals = scan.run(device)
        loss = self.ending.loss(totals.loss, scan.loss.total.dtype)
        grads = self.ending.gradients(totals, loss.weight) if self.differentiates else {}
        return loss, self.ending.states(totals), grads

    def _device(
        self, buffers: dict[str, Any], states: dict[str, Any], batch: PyTree, rng: Any
    ) -> Device:
        plan, ending = self.plan, self.ending
        whole = {name: gathered(x[0], ending.spec(name)) for name, x in buffers.items()}
        if rng is not None:
            rng = place_key(rng, ending.data_axes)
        return Device(
            buffers=whole,
            states={name: x[0] for name, x in states.items()},
            layouts={name: _automatic(plan.layout.specs[name][1:]) for name in buffers},
            batch=batch,
            rng=rng,
            shifts=plan.shifts,
            axis_name=plan.axis_name,
        )

    def _scan(self, device: Device) -> Scan:
        """Return the program for the types of the values on a device."""
        plan = self.plan
        zero = jnp.zeros((), jnp.int32)
        microbatch = device.microbatch(Half(*[zero] * 6, arrivals=()))
        weights = [kind.weights.read(device.buffers, 0) for kind in plan.kinds]
        states = [kind.states and kind.states.read(device.states, 0) for kind in plan.kinds]
        activations, loss = self._types(weights, states, microbatch)
        programs = None
        if self.differentiates:
            x = activations.tree(nothing(activations.types))
            programs = [
                plan.stage_program(
                    kind, leaves, kind.with_state(None if kind.is_first else x, state), microbatch
                )
                for kind, leaves, state in zip(plan.kinds, weights, states, strict=True)
            ]
        return Scan(
            plan=plan,
            table=self.table,
            programs=programs,
            activations=activations,
            loss=loss,
            in_branches=writes_in_branches(plan.mesh),
        )

    def _types(
        self, weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
    ) -> tuple[Activations, LossTerms]:
        """Return the types of activations and of the last stage's result, by tracing all stages."""

        def one_after_the_other(
            weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
        ) -> list[PyTree]:
            results: list[PyTree] = []
            known_results: dict[Any, PyTree] = {}
            x = None
            for i in self.plan.of_stage:
                # Stages of one kind with inputs of equal types have results of equal types.
                key = int(i), str(jax.tree.map(jax.typeof, x))
                if key not in known_results:
                    kind = self.plan.kinds[i]
                    argument = kind.with_state(x, states[i])
                    known_results[key] = kind.fn(weights[i], argument, microbatch)
                x = without_state(known_results[key])
                results.append(x)
            return results

        types = jax.tree.map(jax.typeof, (weights, states, microbatch))
        results = jax.make_jaxpr(one_after_the_other, return_shape=True)(*types)[1]
        return activations_of(results[:-1]), results[-1]._replace(state=None)


def _laid_out(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return `tree` resharded to `specs` over Explicit axes; others are left to jit."""
    explicit = frozenset(mesh.explicit_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        new_spec = only_over(spec, explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, new_spec)) if any(new_spec) else x

    return jax.tree.map(place, tree, specs) if explicit else tree


def _automatic(spec: P) -> P | None:
    """Return the part of a spec over axes that the compiler handles; None if there is none."""
    automatic = frozenset(jax.sharding.get_abstract_mesh().auto_axes)
    return only_over(spec, automatic) if any(only_over(spec, automatic)) else None


def activations_of(results: Sequence[PyTree]) -> Activations:
    """Return the common type of the results of all stages before the last.

    Args:
      results: types of their results, in the order of the model.

    Raises:
      ValueError: two results that differ in structure, shapes or dtypes.
    """
    types = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), y) for y in results]
    every = [Activations(jax.tree.structure(y), tuple(jax.tree.leaves(y))) for y in types]
    for k, other in enumerate(every):
        if other != every[0]:
            raise ValueError(
                "`model`: one program sends activations of one type between all stages, and here "
                f"stage 0 gives {types[0]}, but stage {k} {types[k]}. Cut the model elsewhere "
                '(`parts`), let layers give the same type, or use `executor`="host", which does '
                "not need it."
            )
    return every[0] if every else Activations(jax.tree.structure(()), ())
