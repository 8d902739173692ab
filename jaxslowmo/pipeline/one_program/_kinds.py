"""Which stages of a model one branch of the program computes, and where their weights lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._typing import PyTree
from ..model import LayeredModel, Packing, Place, Run, StageLayout, equal_layers

Buffers = Mapping[str, jax.Array]
Totals = dict[str, jax.Array | None]
"""Gradients by buffer; None for those of integers."""


class Segment(NamedTuple):
    """One leaf of a run: of each of its layers, one after the other in a buffer.

    Attributes:
      place: of the first layer, in the stage that stands for its kind.
      count: of layers.
      size: elements of one layer in the buffer, for each part of the leaf.
    """

    place: Place
    count: int
    size: int


@dataclass(frozen=True)
class StageKind:
    """Stages of a model that are computed alike.

    Attributes:
      fn: of (weights, x, microbatch); weights are one tree per run.
      is_first: whether it takes the microbatch in place of activations.
      is_last: whether it gives the loss.
      runs: the layers of the stage that stands for all.
      segments: of the leaves of its runs, in flattening order.
      treedef: of its weights.
      packing: of all parameters.
      starts: for each buffer, (stages of the model,) int32: how far the leaves of a stage lie from
        those of the stage that stands for its kind.
    """

    fn: Callable[[PyTree, PyTree, PyTree], Any]
    is_first: bool
    is_last: bool
    runs: tuple[Run, ...]
    segments: tuple[Segment, ...]
    treedef: Any
    packing: Packing
    starts: Mapping[str, np.ndarray]

    @property
    def start(self) -> int:
        """The first layer of the stage that stands for all."""
        return self.runs[0].start

    def weights(self, buffers: Buffers, model_stage: Any) -> PyTree:
        """What a stage computes with, of this device's buffers, (*sizes, elements)."""
        return self.treedef.unflatten([self._read(buffers, s, model_stage) for s in self.segments])

    def added(self, totals: Totals, gradients: PyTree, model_stage: jax.Array) -> Totals:
        """Totals by buffer with a stage's gradients in them."""
        new = dict(totals)
        own = self.treedef.flatten_up_to(gradients)
        for segment, gradient in zip(self.segments, own, strict=True):
            name = segment.place.leaf.buffer
            total = new[name]
            if total is not None:
                at = self._start(segment, model_stage)
                flat = self._flat(segment, gradient).astype(total.dtype)
                before = lax.dynamic_slice_in_dim(total, at, flat.shape[-1], total.ndim - 1)
                new[name] = lax.dynamic_update_slice_in_dim(
                    total, before + flat, at, total.ndim - 1
                )
        return new

    def _start(self, segment: Segment, model_stage: Any) -> Any:
        starts = self.starts[segment.place.leaf.buffer]
        if not starts.any():  # all stages of this kind have it at the same place
            return segment.place.start
        return segment.place.start + jnp.asarray(starts)[model_stage]

    def _read(self, buffers: Buffers, segment: Segment, model_stage: Any) -> jax.Array:
        leaf, count = segment.place.leaf, segment.count
        at, buffer = self._start(segment, model_stage), buffers[leaf.buffer]
        slice_at = lax.slice_in_dim if isinstance(at, int) else lax.dynamic_slice_in_dim
        end = count * segment.size + (at if isinstance(at, int) else 0)
        part = slice_at(buffer, at, end, axis=buffer.ndim - 1)
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


def stage_kinds(model: LayeredModel, layout: StageLayout) -> tuple[list[StageKind], np.ndarray]:
    """The kinds of a model's stages, and which kind each stage is.

    Stages are alike if their functions are equal and their leaves lie alike.
    """
    kinds: list[StageKind] = []
    blocks = layout.blocks
    of_stage = np.zeros(len(blocks), np.int32)
    for k, block in enumerate(blocks):
        ends = k == 0, k == len(blocks) - 1
        segments = _segments(layout, k)
        treedef = _treedef(layout, k)
        for i, kind in enumerate(kinds):
            is_alike = (kind.treedef, kind.is_first, kind.is_last) == (treedef, *ends)
            layers = model.layers[block.start : block.end]
            known = model.layers[kind.start : kind.start + len(layers)]
            shifts = _shifts(kind.segments, segments) if is_alike else None
            if shifts is not None and all(map(equal_layers, known, layers)):
                of_stage[k] = i
                for name, shift in shifts.items():
                    kind.starts[name][k] = shift
                break
        else:
            of_stage[k] = len(kinds)
            starts = {name: np.zeros(len(blocks), np.int32) for name in layout.packing.axes}
            fn, runs = model.stage(*block, layout.runs(k)), layout.runs(k)
            kinds.append(StageKind(fn, *ends, runs, segments, treedef, layout.packing, starts))
    return kinds, of_stage


def _segments(layout: StageLayout, model_stage: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(place, run.count, layout.packing.part_size(place.leaf))
        for run in layout.runs(model_stage)
        for place in layout.places(run)
    )


def _treedef(layout: StageLayout, model_stage: int) -> Any:
    """Of a stage's weights: a tuple of the parameters of its runs."""
    own = [layout.treedef(run.start) for run in layout.runs(model_stage)]
    return jax.tree.structure(tuple(d.unflatten([0] * d.num_leaves) for d in own))


def _shifts(known: Sequence[Segment], own: Sequence[Segment]) -> dict[str, int] | None:
    """For each buffer how far leaves lie from those of another stage; None where unlike."""
    shifts: dict[str, int] = {}
    if len(known) != len(own):
        return None
    for one, other in zip(known, own, strict=True):
        leaf = one.place.leaf
        if (leaf, one.count, one.size) != (other.place.leaf, other.count, other.size):
            return None
        shift = other.place.start - one.place.start
        if shifts.setdefault(leaf.buffer, shift) != shift:
            return None
    return shifts
