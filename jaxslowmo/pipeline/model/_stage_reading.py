"""Whether a transform can run on each stage by itself, read from its programs."""

import functools
from collections.abc import Collection
from itertools import chain
from typing import Any, NamedTuple

import jax
import optax

from ..._support.types import PyTree
from ...tracing import ProgramReader, Reading
from ...transform import instead_of, takes_extra
from ...tree import leaf_names
from ._buffer_packing import BufferPacking
from ._ties import seen_once

_EXTRA = ("value", "grad", "value_fn")  # the extra arguments that a training step passes


class StageReading(NamedTuple):
    """The result of reading a transform for a model in stages.

    Attributes:
      refusal: why its result for a leaf may depend on leaves of other stages, and what to use
        instead; "" if it was proved not to.
      on_buffers: whether its results on the buffers of all stages are those on the leaves.
      by_element: whether it combines no elements of a leaf, so that leaves may stay sharded.
      reshapes: whether an update gives the state another structure.
    """

    refusal: str
    on_buffers: bool = False
    by_element: bool = False
    reshapes: bool = False


@functools.lru_cache(maxsize=64)
def read_on_stages(
    packing: BufferPacking,
    tx: optax.GradientTransformationExtraArgs,
    dtypes: tuple[tuple[str, Any], ...],
) -> StageReading:
    """Read a transform for a model in stages.

    Args:
      packing: the packing of the parameters.
      tx: the transform.
      dtypes: name and dtype of each buffer.

    Communication: none; nothing is run.
    """
    reader = ProgramReader()
    types = {n: jax.ShapeDtypeStruct(packing.shapes[n], dtype) for n, dtype in dtypes}
    model = packing.model_types(types)
    state = jax.eval_shape(tx.init, model)
    read = functools.partial(reader.read, tx, extra=_EXTRA if takes_extra(state) else ())
    reading = read(model)
    buffer_of = [leaf.buffer for group in packing.leaves for leaf in group]
    leaf_of = [buffer_of.index(name) for name in types]
    if reading.equals_on_buffers(read(packing.staged(types)), leaf_of):
        return StageReading("", on_buffers=True)

    def read_held(tree: PyTree, held: Collection[int]) -> Reading:
        parts = seen_once(packing.outer.flatten_up_to(tree), packing.ties, held)
        tree = packing.outer.unflatten(parts)
        return read(tree, structure=packing.outer, is_like=packing.mirrors)

    whole = read_held(model, range(len(packing.leaves)))
    every = [
        read_held(packing.types(dict(dtypes), stage), held)
        for stage, held in enumerate(packing.stages)
    ]
    if packing.num_stages > 1 and (why := _why_not(packing, whole, every)):
        return StageReading(f"{why}. {instead_of(state)}")
    return StageReading("", False, whole.by_element, reshapes=len(whole.shared) > 1)


def _why_not(packing: BufferPacking, whole: Reading, every: list[Reading]) -> str:
    """Return why results for a stage may not be those for the whole model; "" if they are."""
    for reading in (whole, *every):
        if reading.kind == "mixing":
            return reading.why
    names = leaf_names(packing.outer.unflatten(range(len(packing.leaves))))
    for reading in every:
        for name, alone, among_all in zip(names, reading.leaves, whole.leaves, strict=True):
            if alone and alone != among_all:
                return f"it treats {name!r} differently where it sees other leaves, too"
    for key, *others in zip(*([*chain(*each.shared)] for each in (whole, *every)), strict=True):
        if key is None or {key} != {*others}:
            return (
                "it keeps a number that is computed from leaves, so that stages would differ in it"
            )
    return ""
