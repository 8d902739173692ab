"""Which stages of a model one branch of the program computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._typing import PyTree
from ..model import Block, LayeredModel, StageLayout
from ._rings import row_of, with_row


@dataclass(frozen=True)
class StageKind:
    """Stages of a model that are computed alike.

    Attributes:
      fn: of (weights, x, microbatch).
      is_first: whether it takes the microbatch in place of activations.
      is_last: whether it gives the loss.
      slots: of its leaves, in flattening order.
      rows: (stages of the model, leaves) where each stage has them.
      treedef: of its weights.
      start: the first layer of the stage that stands for all.
    """

    fn: Callable[[PyTree, PyTree, PyTree], Any]
    is_first: bool
    is_last: bool
    slots: tuple[int, ...]
    rows: np.ndarray
    treedef: Any
    start: int

    def weights(self, slots: Sequence[jax.Array], model_stage: Any) -> PyTree:
        """What a stage computes with, of this device's rows of all slots."""
        rows = self._rows_of(model_stage)
        return self.treedef.unflatten([row_of(slots[s], rows[i]) for i, s in enumerate(self.slots)])

    def added(
        self, totals: list[jax.Array | None], gradients: PyTree, model_stage: jax.Array
    ) -> list[jax.Array | None]:
        """Totals of the slots with a stage's gradients in them; None where there are none."""
        rows = self._rows_of(model_stage)
        new = list(totals)
        for i, (slot, gradient) in enumerate(
            zip(self.slots, self.treedef.flatten_up_to(gradients), strict=True)
        ):
            total = new[slot]
            if total is not None:
                row = rows[i] if total.shape[0] > 1 else 0
                own = row_of(total, row) + gradient.astype(total.dtype)
                new[slot] = with_row(total, row, own)
        return new

    def _rows_of(self, model_stage: Any) -> jax.Array:
        return jnp.asarray(self.rows)[model_stage]


def stage_kinds(
    model: LayeredModel, layout: StageLayout, blocks: Sequence[Block]
) -> tuple[list[StageKind], np.ndarray]:
    """The kinds of a model's stages, and which kind each stage is.

    Stages are alike if their functions are equal and their leaves lie in the same slots.
    """
    kinds: list[StageKind] = []
    of_stage = np.zeros(len(blocks), np.int32)
    places = [layout.stage_places(k) for k in range(len(blocks))]
    for k, block in enumerate(blocks):
        slots = tuple(place.slot for place in places[k])
        treedef = layout.stage_treedef(k)
        ends = k == 0, k == len(blocks) - 1
        layers = model.layers[block.start : block.end]
        for i, kind in enumerate(kinds):
            known = model.layers[kind.start : kind.start + len(layers)]
            is_alike = (kind.slots, kind.treedef, kind.is_first, kind.is_last) == (
                slots,
                treedef,
                *ends,
            )
            if is_alike and all(map(_equal, known, layers)):
                of_stage[k] = i
                kind.rows[k] = [place.row for place in places[k]]
                break
        else:
            rows = np.zeros((len(blocks), len(slots)), np.int32)
            rows[k] = [place.row for place in places[k]]
            of_stage[k] = len(kinds)
            fn = model.stage(*block)
            kinds.append(StageKind(fn, *ends, slots, rows, treedef, block.start))
    return kinds, of_stage


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # objects of others may compare as arrays do
        return False
