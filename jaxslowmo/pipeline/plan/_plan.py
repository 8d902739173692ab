"""What is known of a pipeline before it sees a batch: its kinds of stages, and where leaves lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..._support.types import PyTree
from ..model import LayeredModel, Packing, Place, StageLayout, WithState, equal_layers
from ..schedules import Schedule

Buffers = Mapping[str, jax.Array]
"""By name the buffers of one device, (*sizes, elements)."""


class Segment(NamedTuple):
    """One leaf of a run of layers: those of its layers lie one after the other in a buffer.

    Attributes:
      place: where that of the first layer lies, in the stage that stands for its kind.
      count: number of layers.
      size: elements of one layer in each part of the buffer.
    """

    place: Place
    count: int
    size: int


@dataclass(frozen=True)
class Segments:
    """The leaves of stages of one kind, as one tree per run of layers, stacked in each run.

    Attributes:
      treedef: structure of a tuple of such trees.
      segments: its leaves, in flattening order.
      packing: what lies where.
      starts: for each buffer, (stages of the model,) int32: how far the leaves of a stage lie from
        those of the stage that stands for its kind.
    """

    treedef: Any
    segments: tuple[Segment, ...]
    packing: Packing
    starts: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, layout: StageLayout, model_stage: int) -> "Segments":
        """Return the leaves of a stage of the model, which stands for its kind."""
        runs = layout.runs(model_stage)
        own = [layout.treedef(run.start) for run in runs]
        treedef = jax.tree.structure(tuple(d.unflatten([0] * d.num_leaves) for d in own))
        packing = layout.packing
        segments = [
            Segment(place, run.count, packing.part_size(place.leaf))
            for run in runs
            for place in layout.places(run)
        ]
        starts = {name: np.zeros(len(layout.blocks), np.int32) for name in packing.axes}
        return cls(treedef, tuple(segments), packing, starts)

    def shifts_of(self, other: "Segments") -> dict[str, int] | None:
        """Return for each buffer how far the leaves of another stage lie; None where unlike."""
        shifts: dict[str, int] = {}
        if self.treedef != other.treedef or len(self.segments) != len(other.segments):
            return None
        for one, their in zip(self.segments, other.segments, strict=True):
            leaf = one.place.leaf
            if (leaf, one.count) != (their.place.leaf, their.count):
                return None
            shift = their.place.start - one.place.start
            if shifts.setdefault(leaf.buffer, shift) != shift:
                return None
        return shifts

    def empty(self) -> list[PyTree]:
        """Return the trees of the runs with zeros in the place of their leaves."""
        return list(self.treedef.unflatten([0] * len(self.segments)))

    def read(self, buffers: Buffers, model_stage: Any) -> PyTree:
        """Return the leaves of a stage."""
        return self.treedef.unflatten([self._read(buffers, s, model_stage) for s in self.segments])

    def written(self, buffers: Buffers, tree: PyTree, model_stage: Any) -> dict[str, jax.Array]:
        """Return buffers with the leaves of a stage replaced."""
        new = dict(buffers)
        for segment, x in zip(self.segments, self.treedef.flatten_up_to(tree), strict=True):
            name = segment.place.leaf.buffer
            flat = self._flat(segment, x).astype(new[name].dtype)
            new[name] = _set(new[name], flat, self._start(segment, model_stage))
        return new

    def added(
        self,
        totals: Mapping[str, jax.Array | None],
        tree: PyTree,
        model_stage: Any,
        *,
        in_place: bool,
    ) -> dict[str, jax.Array | None]:
        """Return totals with a stage's leaves added; None where there are none, as of integers.

        `in_place` says that the compiler is that of a TPU, which joins a sum with the update of the
        buffer that it reads from, and then copies the whole buffer for each leaf (libtpu 0.0.52; 78
        copies of 81 MB per microbatch in a GPT of 124 million parameters).
        """
        new = dict(totals)
        for segment, x in zip(self.segments, self.treedef.flatten_up_to(tree), strict=True):
            name = segment.place.leaf.buffer
            total = new[name]
            if total is not None:
                at = self._start(segment, model_stage)
                flat = self._flat(segment, x).astype(total.dtype)
                before = lax.dynamic_slice_in_dim(total, at, flat.shape[-1], total.ndim - 1)
                total_now = before + flat
                if in_place:
                    total_now = lax.optimization_barrier(total_now)
                new[name] = _set(total, total_now, at)
        return new

    def _start(self, segment: Segment, model_stage: Any) -> Any:
        starts = self.starts[segment.place.leaf.buffer]
        if not starts.any():  # all stages of this kind have it at the same place
            return segment.place.start
        if isinstance(model_stage, int):
            return segment.place.start + int(starts[model_stage])
        return segment.place.start + jnp.asarray(starts)[model_stage]

    def _read(self, buffers: Buffers, segment: Segment, model_stage: Any) -> jax.Array:
        leaf, count = segment.place.leaf, segment.count
        at, buffer = self._start(segment, model_stage), buffers[leaf.buffer]
        size, axis = count * segment.size, buffer.ndim - 1
        if isinstance(at, int):
            part = lax.slice_in_dim(buffer, at, at + size, axis=axis)
        else:
            part = lax.dynamic_slice_in_dim(buffer, at, size, axis)
        if count == 1:
            return self.packing.whole(part, leaf)
        part = jnp.moveaxis(part.reshape(*part.shape[:-1], count, segment.size), -2, 0)
        return self.packing.whole(part, leaf, 1)

    def _flat(self, segment: Segment, x: jax.Array) -> jax.Array:
        leaf, count = segment.place.leaf, segment.count
        if count == 1:
            return self.packing.flat(x, leaf)
        part = jnp.moveaxis(self.packing.flat(x, leaf, num_lead=1), 0, -2)
        return part.reshape(*part.shape[:-2], count * segment.size)


def shifted(known: Sequence[Segments], own: Sequence[Segments], model_stage: int) -> bool:
    """Whether the leaves of a stage lie as those of another; `known` then tells how far away."""
    shifts = [one.shifts_of(other) for one, other in zip(known, own, strict=True)]
    if any(shift is None for shift in shifts):
        return False
    for segments, shift in zip(known, shifts, strict=True):
        for name, value in (shift or {}).items():
            segments.starts[name][model_stage] = value
    return True


def _set(buffer: jax.Array, flat: jax.Array, at: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(buffer, flat, at, buffer.ndim - 1)


@dataclass(frozen=True)
class StageKind:
    """Stages of a model that are computed alike.

    Attributes:
      fn: of (weights, x, microbatch); weights are one tree per run of layers.
      is_first: whether it takes the microbatch in place of activations.
      is_last: whether it gives the loss.
      start: the first layer of the stage that stands for all.
      weights: where the parameters lie.
      states: where the model state of its layers lies; None for models without.
    """

    fn: Callable[[PyTree, PyTree, PyTree], Any]
    is_first: bool
    is_last: bool
    start: int
    weights: Segments
    states: Segments | None

    def given(self, x: PyTree, states: PyTree) -> PyTree:
        """What the function takes in the place of activations."""
        return x if self.states is None else WithState(x, list(states))


def stage_kinds(
    model: LayeredModel, layout: StageLayout, state_layout: StageLayout | None
) -> tuple[list[StageKind], np.ndarray]:
    """The kinds of a model's stages, and which kind each stage is.

    Stages are alike if their functions are equal and their leaves lie alike.
    """
    kinds: list[StageKind] = []
    blocks = layout.blocks
    of_stage = np.zeros(len(blocks), np.int32)
    for k, block in enumerate(blocks):
        ends = k == 0, k == len(blocks) - 1
        weights = Segments.of(layout, k)
        states = None if state_layout is None else Segments.of(state_layout, k)
        own = [weights] if states is None else [weights, states]
        layers = model.layers[block.start : block.end]
        for i, kind in enumerate(kinds):
            known = [kind.weights] if kind.states is None else [kind.weights, kind.states]
            others = model.layers[kind.start : kind.start + len(layers)]
            is_alike = (kind.is_first, kind.is_last) == ends
            is_alike = is_alike and all(map(equal_layers, others, layers))
            if is_alike and shifted(known, own, k):
                of_stage[k] = i
                break
        else:
            of_stage[k] = len(kinds)
            fn = model.stage(*block, layout.runs(k))
            kinds.append(StageKind(fn, *ends, block.start, weights, states))
    return kinds, of_stage


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
