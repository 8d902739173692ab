"""One step of a pipeline, as one device sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...mesh import axis_size, from_first
from ..model import (
    LayeredModel,
    Loss,
    LossTerms,
    Place,
    StageLayout,
    WithState,
    quotient,
)
from ..split import split_stage
from ._activations import Activations, activations_of, nothing
from ._data import gathered, only_over, scattered_sum
from ._device import Device
from ._kinds import StageKind
from ._scan import Scan, Totals
from ._table import Half, TickTable
from ._tied import with_tied_sums


@dataclass(frozen=True)
class Plan:
    """What is known of a pipeline before it sees a batch.

    Attributes:
      model: whole.
      layout: of its parameters.
      state_layout: of the model state of its layers; None for models without.
      kinds: of its stages.
      of_stage: per stage of the model its kind.
      shifts: per stage of the model, how far its layers are from those of the stage that stands
        for its kind.
      tied: where the copies of shared parameters lie.
      axis_name: of the stages.
      num_microbatches: of a step.
      remat: whether backward passes compute again what forward passes have computed.
      gradient_scale: what gradients are multiplied by on their way.
      in_branches: whether branches write into the buffers; see `InBranches`.
    """

    model: LayeredModel
    layout: StageLayout
    state_layout: StageLayout | None
    kinds: Sequence[StageKind]
    of_stage: np.ndarray
    shifts: np.ndarray
    tied: Sequence[Sequence[Place]]
    axis_name: str
    num_microbatches: int
    remat: bool
    gradient_scale: float
    in_branches: bool


@dataclass(frozen=True)
class Step:
    """Loss and gradients of a batch, as a function that is mapped over stages and data axes.

    Attributes:
      plan: of the pipeline.
      table: of the schedule.
      data_axes: between whose devices microbatches are split.
      outer_axes: data axes that are mapped already, between whose devices the caller has split the
        batch, and averages.
      axes: all axes that some value varies over.
      differentiates: whether there are gradients.
    """

    plan: Plan
    table: TickTable
    data_axes: tuple[str, ...]
    outer_axes: tuple[str, ...]
    axes: tuple[str, ...]
    differentiates: bool

    def __call__(
        self, buffers: dict[str, Any], states: dict[str, Any], batch: PyTree, rng: Any
    ) -> tuple[Loss, dict[str, Any], dict[str, Any]]:
        """Loss and metrics, equal on all these devices; model state and gradients of its stage."""
        device = self._device(buffers, states, batch, rng)
        scan = self._scan(device)
        totals = scan.run(device)
        terms = self._terms(totals)
        grads = self._gradients(totals, terms) if self.differentiates else {}
        value = terms.value(self.plan.num_microbatches * self._num_shares)
        dtype = scan.loss.total.dtype
        if isinstance(value, tuple):
            value = value[0].astype(dtype), value[1]
        else:
            value = value.astype(dtype)
        return value, self._states(totals), grads

    def _device(
        self, buffers: dict[str, Any], states: dict[str, Any], batch: PyTree, rng: Any
    ) -> Device:
        plan = self.plan
        whole = {name: gathered(x[0], self._spec(name)) for name, x in buffers.items()}
        if rng is not None:
            for name in self.data_axes:
                rng = jax.random.fold_in(rng, lax.axis_index(name))
        device = Device(
            buffers=whole,
            states={name: x[0] for name, x in states.items()},
            layouts={name: _automatic(P(*plan.layout.specs[name][1:])) for name in buffers},
            batch=batch,
            rng=rng,
            shifts=plan.shifts,
            axes=self.axes,
            axis_name=plan.axis_name,
        )
        return device.varied()

    def _scan(self, device: Device) -> Scan:
        """The program, for values of the types that a device has."""
        plan = self.plan
        zero = jnp.zeros((), jnp.int32)
        microbatch = device.vary(device.microbatch(Half(*[zero] * 6, arrivals=())))
        weights = [kind.weights.read(device.buffers, 0) for kind in plan.kinds]
        states = [kind.states and kind.states.read(device.states, 0) for kind in plan.kinds]
        activations, loss = self._types(weights, states, microbatch)
        x = device.vary(activations.tree(nothing(activations.types)))
        programs = None
        if self.differentiates:
            programs = [
                split_stage(
                    kind.fn,
                    own,
                    kind.given(None if kind.is_first else x, state),
                    microbatch,
                    loss=kind.is_last,
                    remat=plan.remat,
                )
                for kind, own, state in zip(plan.kinds, weights, states, strict=True)
            ]
        return Scan(
            table=self.table,
            kinds=plan.kinds,
            of_stage=plan.of_stage,
            programs=programs,
            activations=activations,
            loss=loss,
            # Of a quotient the sum is differentiated; its weight is known when all have run.
            seed=plan.gradient_scale / (1 if loss.weight is not None else plan.num_microbatches),
            in_branches=plan.in_branches,
        )

    def _types(
        self, weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
    ) -> tuple[Activations, LossTerms]:
        """What travels, and what the last stage gives; from tracing one stage after the other."""

        def one_after_the_other(
            weights: Sequence[PyTree], states: Sequence[PyTree], microbatch: PyTree
        ) -> list[PyTree]:
            results: list[PyTree] = []
            known: dict[Any, PyTree] = {}
            x = None
            for i in self.plan.of_stage:
                # Of a stage that is like one before and is given the like, the result is known.
                key = int(i), str(jax.tree.map(jax.typeof, x))
                if key not in known:
                    kind = self.plan.kinds[i]
                    known[key] = kind.fn(weights[i], kind.given(x, states[i]), microbatch)
                result = known[key]
                x = result.x if isinstance(result, WithState) else result
                results.append(x)
            return results

        types = jax.tree.map(jax.typeof, (weights, states, microbatch))
        results = jax.make_jaxpr(one_after_the_other, return_shape=True)(*types)[1]
        return activations_of(results[:-1]), results[-1]._replace(state=None)

    def _terms(self, totals: Totals) -> LossTerms:
        """Sums over all microbatches of what the last stage alone has added up.

        Communication: one all-reduce of a few numbers over the stages and the data axes; of a
          weight one over data axes that are mapped outside.
        """
        terms = totals.loss
        if self.outer_axes:
            # The caller takes the mean over these axes, of quotients by the mean weight.
            terms = terms.with_weights(lambda x: lax.pmean(x, self.outer_axes))
        return lax.psum(terms, (self.plan.axis_name, *self.data_axes))

    def _states(self, totals: Totals) -> dict[str, jax.Array]:
        """By buffer the model state of a stage, (1, elements), after all microbatches.

        Communication: over the data axes one all-reduce of each buffer.
        """

        def agreed(x: jax.Array) -> jax.Array:
            if not self.data_axes:
                return x
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            return lax.pmean(x, self.data_axes) if is_float else from_first(x, self.data_axes)

        return {name: agreed(x)[None] for name, x in totals.states.items()}

    def _gradients(self, totals: Totals, terms: LossTerms) -> dict[str, jax.Array]:
        """By buffer, (1, *sizes, elements), in the dtypes of the parameters.

        Communication: over the data axes one reduce-scatter of each buffer that is sharded there,
          an all-reduce of the others; over the stages that of tied parameters.
        """
        plan = self.plan
        scale = 1 / (plan.gradient_scale * (1 if terms.weight is not None else self._num_shares))
        sums: dict[str, jax.Array] = {}
        for name, total in totals.grads.items():
            if total is not None:
                total = scattered_sum(total, self._spec(name), self.data_axes)
                total = total if scale == 1 else total * scale
                sums[name] = total if terms.weight is None else quotient(total, terms.weight)
        sums = with_tied_sums(sums, plan.tied, plan.layout.packing, plan.axis_name)
        dtypes = {name: name.partition("/")[0] for name in sums}
        return {name: total[None].astype(dtypes[name]) for name, total in sums.items()}

    @property
    def _num_shares(self) -> int:
        return math.prod(map(axis_size, self.data_axes))

    def _spec(self, name: str) -> P:
        """How a stage's buffer is sharded over the data axes."""
        return only_over(self.plan.layout.specs[name][1:], self.data_axes)


def _automatic(spec: P) -> P | None:
    """Of a stage's buffer, over axes that the compiler handles; None where it has none."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    own = only_over(spec, [name for name, kind in kinds if kind == AxisType.Auto])
    return own if any(own) else None
