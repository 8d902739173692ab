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
from ...mesh import axis_size
from ..model import LayeredModel, Loss, Place, StageLayout
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
      axes: all axes that some value varies over.
      differentiates: whether there are gradients.
    """

    plan: Plan
    table: TickTable
    data_axes: tuple[str, ...]
    axes: tuple[str, ...]
    differentiates: bool

    def __call__(self, buffers: dict[str, Any], batch: PyTree, rng: Any) -> tuple[Loss, PyTree]:
        """Loss and metrics, equal on all these devices, and the gradients of this device's part."""
        device = self._device(buffers, batch, rng)
        scan = self._scan(device)
        totals = scan.run(device)
        loss = self._mean_loss(totals, scan.loss)
        return loss, self._gradients(totals) if self.differentiates else {}

    def _device(self, buffers: dict[str, Any], batch: PyTree, rng: Any) -> Device:
        plan = self.plan
        whole = {name: gathered(x[0], self._spec(name)) for name, x in buffers.items()}
        if rng is not None:
            for name in self.data_axes:
                rng = jax.random.fold_in(rng, lax.axis_index(name))
        device = Device(
            buffers=whole,
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
        weights = [kind.weights(device.buffers, 0) for kind in plan.kinds]
        activations, loss = self._types(weights, microbatch)
        x = device.vary(activations.tree(nothing(activations.types)))
        programs = None
        if self.differentiates:
            programs = [
                split_stage(
                    kind.fn,
                    own,
                    None if kind.is_first else x,
                    microbatch,
                    loss=kind.is_last,
                    remat=plan.remat,
                )
                for kind, own in zip(plan.kinds, weights, strict=True)
            ]
        return Scan(
            table=self.table,
            kinds=plan.kinds,
            of_stage=plan.of_stage,
            programs=programs,
            activations=activations,
            loss=loss,
            seed=plan.gradient_scale / plan.num_microbatches,
            in_branches=plan.in_branches,
        )

    def _types(self, weights: Sequence[PyTree], microbatch: PyTree) -> tuple[Activations, PyTree]:
        """What travels, and what the last stage gives; from tracing one stage after the other."""

        def one_after_the_other(weights: Sequence[PyTree], microbatch: PyTree) -> list[PyTree]:
            results: list[PyTree] = []
            known: dict[Any, PyTree] = {}
            x = None
            for i in self.plan.of_stage:
                # Of a stage that is like one before and is given the like, the result is known.
                key = int(i), str(jax.tree.map(jax.typeof, x))
                if key not in known:
                    known[key] = self.plan.kinds[i].fn(weights[i], x, microbatch)
                x = known[key]
                results.append(x)
            return results

        types = jax.tree.map(jax.typeof, (weights, microbatch))
        results = jax.make_jaxpr(one_after_the_other, return_shape=True)(*types)[1]
        return activations_of(results[:-1]), results[-1]

    def _mean_loss(self, totals: Totals, types: PyTree) -> Loss:
        """Means over microbatches, of what the last stage alone has added up.

        Communication: one all-reduce of a few numbers over the stages and the data axes.
        """
        axes = (self.plan.axis_name, *self.data_axes)
        count = self.plan.num_microbatches * self._num_shares
        leaves, treedef = jax.tree.flatten(types)
        sums = lax.psum(treedef.flatten_up_to(totals.loss), axes)
        loss, *metrics = (x / count for x in sums)
        return treedef.unflatten([loss.astype(leaves[0].dtype), *metrics])

    def _gradients(self, totals: Totals) -> dict[str, jax.Array]:
        """By buffer, (1, *sizes, elements), in the dtypes of the parameters.

        Communication: over the data axes one reduce-scatter of each buffer that is sharded there,
          an all-reduce of the others; over the stages that of tied parameters.
        """
        plan = self.plan
        scale = 1 / (plan.gradient_scale * self._num_shares)
        sums: dict[str, jax.Array] = {}
        for name, total in totals.grads.items():
            if total is not None:
                total = scattered_sum(total, self._spec(name), self.data_axes)
                sums[name] = total if scale == 1 else total * scale
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
