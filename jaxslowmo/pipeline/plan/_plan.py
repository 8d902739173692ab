"""What is known of a pipeline before it sees a batch, and what ends a step of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ...mesh import axis_size, from_first
from ..model import LayeredModel, Loss, LossTerms, Packing, Place, StageLayout, quotient
from ..schedules import Schedule
from ..tied import sum_over_holders
from ._kinds import StageKind
from ._microbatches import only_over, scattered_sum


class Totals(NamedTuple):
    """What the operations of a step add up to on one device.

    Attributes:
      loss: the sum over microbatches of what the last stage returns; at least float32.
      grads: for each buffer the sum of its gradients, (*sizes, elements) in at least float32; None
        for buffers without gradients.
      states: for each buffer the model state of the layers after the last microbatch.
    """

    loss: LossTerms
    grads: dict[str, jax.Array | None]
    states: dict[str, jax.Array]


@dataclass(frozen=True)
class Plan:
    """What is known of a pipeline before it sees a batch.

    Attributes:
      model: the whole model.
      schedule: which stage computes what when.
      mesh: the devices.
      axis_name: the axis of the stages.
      data_axes: the axes inside a replica over which each microbatch is split.
      layout: where the parameters lie.
      state_layout: where the model state of the layers lies; None for models without.
      kinds: the kinds of stages, of which those of one kind are computed alike.
      of_stage: for each stage of the model the number of its kind.
      shifts: for each stage of the model how far its layers are from those of the stage that stands
        for its kind.
      tied: where the copies of each tied parameter lie.
      remat: whether backward passes compute again what forward passes have computed.
      gradient_scale: the factor of gradients between stages.
      batch_memory: where microbatches wait, `"device"` or `"host"`.
    """

    model: LayeredModel
    schedule: Schedule
    mesh: Mesh
    axis_name: str
    data_axes: tuple[str, ...]
    layout: StageLayout
    state_layout: StageLayout | None
    kinds: Sequence[StageKind]
    of_stage: np.ndarray
    shifts: np.ndarray
    tied: Sequence[Sequence[Place]]
    remat: bool
    gradient_scale: float
    batch_memory: str

    def seed(self, is_quotient: bool) -> float:
        """Return the cotangent of the loss of a microbatch."""
        # The sum of a quotient is differentiated; its weight is known when all have run.
        return self.gradient_scale / (1 if is_quotient else self.schedule.num_microbatches)


@dataclass(frozen=True)
class Ending:
    """What is done once per step with the totals of all devices, under their axes.

    Attributes:
      plan: the pipeline.
      data_axes: the axes over which this program splits microbatches.
      outer_axes: data axes that are mapped outside, between whose devices the caller has split the
        batch, and averages.
    """

    plan: Plan
    data_axes: tuple[str, ...]
    outer_axes: tuple[str, ...]

    def loss(self, terms: LossTerms, dtype: jnp.dtype) -> tuple[Loss, LossTerms]:
        """Return loss and metrics, the loss in its own dtype, and the terms of all microbatches.

        Communication: one all-reduce of a few numbers over the stages and the data axes; of a
          weight one over data axes that are mapped outside.
        """
        if self.outer_axes:
            # The caller takes the mean over these axes, of quotients by the mean weight.
            terms = terms.with_weights(lambda x: lax.pmean(x, self.outer_axes))
        # The last stage alone has added something up.
        terms = lax.psum(terms, (self.plan.axis_name, *self.data_axes))
        value = terms.value(self.plan.schedule.num_microbatches * self._num_shares)
        if isinstance(value, tuple):
            return (value[0].astype(dtype), value[1]), terms
        return value.astype(dtype), terms

    def states(self, totals: Totals) -> dict[str, jax.Array]:
        """Return by buffer the model state of a stage, (1, elements), after all microbatches.

        Communication: over the data axes one all-reduce of each buffer.
        """

        def agreed(x: jax.Array) -> jax.Array:
            if not self.data_axes:
                return x
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            return lax.pmean(x, self.data_axes) if is_float else from_first(x, self.data_axes)

        return {name: agreed(x)[None] for name, x in totals.states.items()}

    def gradients(self, totals: Totals, terms: LossTerms) -> dict[str, jax.Array]:
        """Return by buffer the gradients, (1, *sizes, elements), in the dtypes of the parameters.

        Communication: over the data axes one reduce-scatter of each buffer that is sharded there,
          an all-reduce of the others; over the stages that of tied parameters.
        """
        plan = self.plan
        scale = 1 / (plan.gradient_scale * (1 if terms.weight is not None else self._num_shares))
        sums: dict[str, jax.Array] = {}
        for name, total in totals.grads.items():
            if total is not None:
                total = scattered_sum(total, self.spec(name), self.data_axes)
                total = total if scale == 1 else total * scale
                sums[name] = total if terms.weight is None else quotient(total, terms.weight)
        sums = _with_tied_sums(sums, plan.tied, plan.layout.packing, plan.axis_name)
        dtypes = {name: name.partition("/")[0] for name in sums}
        return {name: total[None].astype(dtypes[name]) for name, total in sums.items()}

    def spec(self, name: str) -> P:
        """Return how a stage's buffer is sharded over the data axes."""
        return only_over(self.plan.layout.specs[name][1:], self.data_axes)

    @property
    def _num_shares(self) -> int:
        return math.prod(map(axis_size, self.data_axes))


def _with_tied_sums(
    grads: dict[str, jax.Array],
    groups: Sequence[Sequence[Place]],
    packing: Packing,
    axis_name: str,
) -> dict[str, jax.Array]:
    """Return gradients by buffer, (*sizes, elements), in which copies of a parameter have their sum.

    Communication: that of `sum_over_holders` for the groups of which several stages hold copies.
    """
    groups = [group for group in groups if group[0].leaf.buffer in grads]
    if not groups:
        return grads

    def part_of(buffers: dict[str, jax.Array], place: Place) -> jax.Array:
        """What lies at a place; on other stages anything."""
        end = place.start + packing.part_size(place.leaf)
        return buffers[place.leaf.buffer][..., place.start : end]

    stage = lax.axis_index(axis_name)
    sums: list[jax.Array] = []
    for group in groups:
        parts = [(part_of(grads, place), place.stage) for place in group]
        masked = [jnp.where(stage == holder, x, jnp.zeros_like(x)) for x, holder in parts]
        sums.append(sum(masked[1:], start=masked[0]))
    holders = [tuple(sorted({place.stage for place in group})) for group in groups]
    across = [i for i, stages in enumerate(holders) if len(stages) > 1]
    exchanged = sum_over_holders([sums[i] for i in across], [holders[i] for i in across], axis_name)
    for i, total in zip(across, exchanged, strict=True):
        sums[i] = total
    new = dict(grads)
    for group, total in zip(groups, sums, strict=True):
        for place in group:
            buffer = new[place.leaf.buffer]
            part = jnp.where(stage == place.stage, total, part_of(new, place))
            new[place.leaf.buffer] = lax.dynamic_update_slice_in_dim(
                buffer, part, place.start, buffer.ndim - 1
            )
    return new
