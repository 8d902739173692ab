"""Which stages of a model one branch of the program computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._typing import PyTree
from ..model import LayeredModel, StageLayout, WithState, equal_layers
from ._segments import Segments, shifted


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
