"""The plan of a pipeline: its kinds of stages, the places of leaves, and the end of a step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..gradients.tied import sum_over_holders
from ..mesh import axis_names, axis_size, broadcast_from_first, restrict_spec
from ..tree import LeafPlace
from ._split_stage import StageProgram, split_stage
from .model import (
    LayeredModel,
    Loss,
    LossTerms,
    StageLayout,
    WithState,
    quotient,
    without_state,
)
from .schedules import Schedule

Buffers = Mapping[str, jax.Array]
"""The buffers of one device by name, each (*sizes, elements)."""


@dataclass(frozen=True)
class StageLeaves:
    """The leaves of stages of one kind: one tree per run of layers, stacked over the run.

    Attributes:
      treedef: structure of a tuple of such trees.
      places: the places of its leaves in the first stage of its kind, in flattening order.
      shifts: maps each buffer to (stages of the model,) int32, the offset of a stage's leaves from
        those of the first stage of its kind.
    """

    treedef: Any
    places: tuple[LeafPlace, ...]
    shifts: Mapping[str, np.ndarray]

    @classmethod
    def from_layout(cls, layout: StageLayout, members: Sequence[int]) -> "StageLeaves":
        """Return the leaves of these stages of the model, which are of one kind."""
        treedef, places = layout.places(members[0])
        shifts = {name: np.zeros(len(layout.blocks), np.int32) for name in layout.packing.axes}
        for k in members:
            # The leaves in a buffer follow each other in one order, so all have the same offset.
            for first, place in zip(places, layout.places(k)[1], strict=True):
                shifts[place.leaf.buffer][k] = place.start - first.start
        return cls(treedef, places, shifts)

    def read(self, buffers: Buffers, model_stage: Any) -> PyTree:
        """Return the leaves of a stage, read from the buffers."""
        places = self._places(model_stage)
        return self.treedef.unflatten([p.read(buffers[p.leaf.buffer]) for p in places])

    def write(self, buffers: Buffers, tree: PyTree, model_stage: Any) -> dict[str, jax.Array]:
        """Return buffers with the leaves of a stage replaced."""
        new = dict(buffers)
        for place, x in self._leaf_pairs(tree, model_stage):
            new[place.leaf.buffer] = place.write(new[place.leaf.buffer], place.leaf.flat(x))
        return new

    def accumulate(
        self,
        totals: Mapping[str, jax.Array | None],
        tree: PyTree,
        model_stage: Any,
        *,
        in_place: bool,
    ) -> dict[str, jax.Array | None]:
        """Return totals with a stage's leaves added; a total of integers is None and stays so.

        `in_place` puts a barrier between each sum and the update of the buffer, for TPUs: their
        compiler fuses the two, and then copies the whole buffer for each leaf (libtpu 0.0.52: 78
        copies of 81 MB per microbatch in a GPT of 124 million parameters).
        """
        new = dict(totals)
        for place, x in self._leaf_pairs(tree, model_stage):
            total = new[place.leaf.buffer]
            if total is not None:
                total_now = place.part(total) + place.leaf.flat(x).astype(total.dtype)
                if in_place:
                    total_now = lax.optimization_barrier(total_now)
                new[place.leaf.buffer] = place.write(total, total_now)
        return new

    def _leaf_pairs(self, tree: PyTree, model_stage: Any) -> Iterable[tuple[LeafPlace, Any]]:
        """Return the places of a stage's leaves, each with its leaf in `tree`."""
        return zip(self._places(model_stage), self.treedef.flatten_up_to(tree), strict=True)

    def _places(self, model_stage: Any) -> list[LeafPlace]:
        """Return the places in a stage of this kind, whose number may be traced."""

        def shift(shifts: np.ndarray) -> Any:
            if not shifts.any():  # all stages of this kind have the leaf at the same place
                return 0
            is_known = isinstance(model_stage, int)
            return int(shifts[model_stage]) if is_known else jnp.asarray(shifts)[model_stage]

        return [p._replace(start=p.start + shift(self.shifts[p.leaf.buffer])) for p in self.places]


@dataclass(frozen=True)
class StageKind:
    """A kind of stages: stages of a model that run the same program.

    Attributes:
      fn: function (weights, x, microbatch) of the stage; weights are one tree per run of layers.
      is_first: whether it takes the microbatch in place of activations.
      is_last: whether it returns the loss.
      start: index of the first layer of the first stage of this kind.
      weights: the places of the parameters.
      states: the places of the model state of its layers; None for models without.
    """

    fn: Callable[[PyTree, PyTree, PyTree], Any]
    is_first: bool
    is_last: bool
    start: int
    weights: StageLeaves
    states: StageLeaves | None = None

    def with_state(self, x: PyTree, states: PyTree) -> PyTree:
        """Return the argument `x` of `fn`: activations, with model state if there is any."""
        return x if self.states is None else WithState(x, list(states))

    def forward(
        self, program: StageProgram | None, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> tuple[PyTree, Sequence[jax.Array], PyTree]:
        """Run the forward pass of a stage.

        Args:
          program: the operations of the stage; None if there is no backward pass.
          weights: one tree per run of layers.
          x: the result of `with_state`.
          microbatch: the microbatch, in the form that layers take.

        Returns:
          Activations or terms of the loss; the stash for the backward pass; the new state of each
          run of layers, None for models without.
        """
        stash: Sequence[jax.Array] = ()
        if program is None:
            y = self.fn(weights, x, microbatch)
        else:
            y, stash = program.forward(weights, x, microbatch)
        after = None
        if self.states is not None:
            after = tuple(y.state if self.is_last else y.states)
        return (y._replace(state=None) if self.is_last else without_state(y)), stash, after


def stage_kinds(
    model: LayeredModel, layouts: Sequence[StageLayout], *, loops: bool
) -> tuple[list[StageKind], np.ndarray]:
    """Return the kinds of a model's stages, and (stages of the model,) int32, each stage's kind.

    Stages are of one kind if their functions and their leaves are equal.

    Args:
      model: the layers.
      layouts: the layout of the parameters, and that of the model state if there is one.
      loops: whether equal layers in a row are a loop. A loop cannot be divided into B and W, so
        schedules that divide backward passes have their layers written out.
    """
    blocks, runs = layouts[0].blocks, layouts[0].all_runs
    last = len(blocks) - 1

    def leaves_of(k: int) -> Any:
        pairs = [layout.places(k) for layout in layouts]
        return [(tree, [p.leaf for p in places]) for tree, places in pairs]

    leaves = [leaves_of(k) for k in range(len(blocks))]

    def are_alike(a: int, b: int) -> bool:
        layers = [range(*blocks[k]) for k in (a, b)]
        same_ends = (a == 0, a == last) == (b == 0, b == last)
        is_like = same_ends and len(layers[0]) == len(layers[1])
        return is_like and all(map(model.equal_layers, *layers)) and leaves[a] == leaves[b]

    by_kind: list[list[int]] = []  # stages of the model
    for k in range(len(blocks)):
        members = next((each for each in by_kind if are_alike(each[0], k)), None)
        if members is None:
            by_kind.append([k])
        else:
            members.append(k)
    kinds, kind_index = [], np.zeros(len(blocks), np.int32)
    for i, members in enumerate(by_kind):
        k, kind_index[members] = members[0], i
        fn = model.stage(*blocks[k], runs[k], loops=loops)
        each = (StageLeaves.from_layout(layout, members) for layout in layouts)
        kinds.append(StageKind(fn, k == 0, k == last, blocks[k].start, *each))
    return kinds, kind_index


@dataclass(frozen=True)
class Plan:
    """The description of a pipeline that does not depend on a batch.

    Attributes:
      model: the whole model.
      schedule: the order of the operations of each stage.
      mesh: the devices.
      axis_name: the axis of the stages.
      data_axes: the axes inside a replica over which each microbatch is split.
      layout: the layout of the parameters.
      state_layout: the layout of the model state; None for models without.
      kinds: the kinds of stages; stages of one kind run the same program.
      kind_index: (stages of the model,) int32, index of each stage's kind.
      tied: the places of the copies of each tied parameter.
      remat: whether backward passes compute again what forward passes have computed.
      gradient_scale: the factor of gradients between stages.
      batch_memory: the memory that holds the microbatches, `"device"` or `"host"`.
    """

    model: LayeredModel
    schedule: Schedule
    mesh: Mesh
    axis_name: str
    data_axes: tuple[str, ...]
    layout: StageLayout
    state_layout: StageLayout | None
    kinds: Sequence[StageKind]
    kind_index: np.ndarray
    tied: Sequence[Sequence[LeafPlace]]
    remat: bool
    gradient_scale: float
    batch_memory: str

    @cached_property
    def shifts(self) -> np.ndarray:
        """(stages of the model,) ints, offset of each first layer from that of its kind."""
        starts = [block.start for block in self.layout.blocks]
        return np.array(starts) - np.array([self.kinds[i].start for i in self.kind_index])

    def stage_program(
        self, kind: StageKind, weights: PyTree, x: PyTree, microbatch: PyTree
    ) -> StageProgram:
        """Return the operations of a stage, traced for arguments of these types."""
        return split_stage(kind.fn, weights, x, microbatch, loss=kind.is_last, remat=self.remat)

    def cotangent(self, kind: StageKind, program: StageProgram, dy: PyTree) -> PyTree:
        """Return the cotangent of a stage's result, from `dy`, that of its activations."""
        if kind.is_last:
            terms = program.y
            # With a weight only the sum is differentiated: `StepReduction.gradients` divides by the
            # total weight, which is known when all microbatches have run.
            count = 1 if terms.weight is not None else self.schedule.num_microbatches
            return jnp.asarray(self.gradient_scale / count, terms.total.dtype)
        if kind.states is None:
            return dy
        segments = kind.states
        return WithState(dy, list(segments.treedef.unflatten([None] * len(segments.places))))


def all_gather_leaf(x: jax.Array, spec: P) -> jax.Array:
    """Return a whole leaf, gathered from the parts that devices hold.

    Communication: one all-gather over each axis in `spec`.
    """
    for dim, entry in enumerate(spec):
        # The first axis of an entry varies slowest, so it is gathered last.
        for name in reversed(axis_names(entry or ())):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def reduce_scatter(x: jax.Array, spec: P, axes: Sequence[str]) -> jax.Array:
    """Return the part of a sum over `axes` that a device holds according to `spec`.

    Communication: one reduce-scatter over each axis in `spec`, one all-reduce over the others.
    """
    named = set()
    for dim, entry in enumerate(spec):
        for name in axis_names(entry or ()):
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
            named.add(name)
    others = tuple(name for name in axes if name not in named)
    return lax.psum(x, others) if others else x


class Totals(NamedTuple):
    """The sums over the microbatches of a step on one device.

    Attributes:
      loss: the sum of the last stage's results; at least float32.
      grads: maps each buffer to the sum of its gradients, (*sizes, elements) in at least float32;
        None for buffers without gradients.
      states: maps each buffer to the model state after the last microbatch.
    """

    loss: LossTerms
    grads: Mapping[str, jax.Array | None]
    states: dict[str, jax.Array]


@dataclass(frozen=True)
class StepReduction:
    """The end of a step: reductions of the totals of all devices, called under their mapped axes.

    Attributes:
      plan: the plan of the pipeline.
      data_axes: the axes over which this program splits microbatches.
      outer_axes: data axes that the caller has mapped; it splits batches and averages over them.
    """

    plan: Plan
    data_axes: tuple[str, ...]
    outer_axes: tuple[str, ...]

    def loss(self, terms: LossTerms, dtype: jnp.dtype) -> Loss:
        """Return the loss of all microbatches, in `dtype`.

        Communication: one all-reduce of a few numbers over the stages and the data axes; if there
          is a weight, one of it over data axes that are mapped outside.
        """
        if self.outer_axes:
            # The caller averages quotients over these axes, so all must have the mean weight.
            terms = terms.with_weights(lambda x: lax.pmean(x, self.outer_axes))
        # Only the last stage has a loss; the terms of the others are 0.
        terms = lax.psum(terms, (self.plan.axis_name, *self.data_axes))
        loss = terms.loss(self.plan.schedule.num_microbatches * self._num_shares)
        return loss._replace(value=loss.value.astype(dtype))

    def states(self, totals: Totals) -> dict[str, jax.Array]:
        """Return the model state of a stage after all microbatches, buffers (1, elements).

        Communication: over the data axes one all-reduce of each buffer.
        """

        def mean_state(x: jax.Array) -> jax.Array:
            if not self.data_axes:
                return x
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            return (lax.pmean if is_float else broadcast_from_first)(x, self.data_axes)

        return {name: mean_state(x)[None] for name, x in totals.states.items()}

    def gradients(self, totals: Totals, weight: jax.Array | None) -> dict[str, jax.Array]:
        """Return the gradients in the dtypes of the parameters, buffers (1, *sizes, elements).

        `weight` is that of the loss of all microbatches.

        Communication: over the data axes one reduce-scatter of each buffer that is sharded there,
          an all-reduce of the others; over the stages that of `sum_over_holders` for tied leaves.
        """
        plan = self.plan
        scale = 1 / (plan.gradient_scale * (1 if weight is not None else self._num_shares))
        sums = {
            name: reduce_scatter(total, self.spec(name), self.data_axes)
            for name, total in totals.grads.items()
            if total is not None
        }
        sums = _sum_tied_copies(sums, plan.tied, plan.axis_name)

        def mean(name: str, total: jax.Array) -> jax.Array:
            total = total if scale == 1 else total * scale
            total = total if weight is None else quotient(total, weight)
            return total[None].astype(name.partition("/")[0])

        return {name: mean(name, total) for name, total in sums.items()}

    def spec(self, name: str) -> P:
        """Return the sharding of a stage's buffer over the data axes."""
        return restrict_spec(self.plan.layout.specs[name][1:], frozenset(self.data_axes))

    @property
    def _num_shares(self) -> int:
        return math.prod(map(axis_size, self.data_axes))


def _sum_tied_copies(
    grads: dict[str, jax.Array],
    groups: Sequence[Sequence[LeafPlace]],
    axis_name: str,
) -> dict[str, jax.Array]:
    """Return gradients by buffer, (*sizes, elements), with the sum in place of each tied copy.

    Communication: that of `sum_over_holders` for the groups whose copies are on several stages.
    """
    groups = [group for group in groups if group[0].leaf.buffer in grads]
    if not groups:
        return grads

    stage = lax.axis_index(axis_name)
    sums: list[jax.Array] = []
    for group in groups:
        # On other stages the elements at a place are arbitrary.
        parts = [(place.part(grads[place.leaf.buffer]), place.stage) for place in group]
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
            part = jnp.where(stage == place.stage, total, place.part(buffer))
            new[place.leaf.buffer] = place.write(buffer, part)
    return new
