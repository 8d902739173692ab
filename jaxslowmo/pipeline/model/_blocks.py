"""Which layers make a stage of the model, and which of these are computed by one loop."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

# Shorter rows are written out: a loop keeps the compiler from joining what stands in it with what
# stands beside it.
_SHORTEST = 4


class Block(NamedTuple):
    """Layers `start` to `end`, without `end`: a stage of the model."""

    start: int
    end: int


def model_blocks(
    num_layers: int, num_stages: int, num_chunks: int = 1, parts: Sequence[Any] | None = None
) -> tuple[Block, ...]:
    """The stages of a model, in its order.

    Args:
      num_layers: of the model.
      num_stages: device stages.
      num_chunks: stages of the model that each device stage holds.
      parts: as `js.partition_uniform` and its kin return them: per device stage a list of
        [start, end), one per chunk. None: as even as can be.

    Returns:
      `num_stages * num_chunks` blocks.

    Raises:
      ValueError: more stages than layers, a stage without layers, another number of blocks, layers
        that no block has or several have.
    """
    count = num_stages * num_chunks
    of_chunks = f" * {num_chunks} chunks" if num_chunks > 1 else ""
    if count > num_layers:
        raise ValueError(
            f"`schedule` has {num_stages} stages{of_chunks} and the model {num_layers} layers: "
            "every stage needs a layer of its own."
        )
    if parts is None:
        bounds = [num_layers * k // count for k in range(count + 1)]
        return tuple(map(Block, bounds[:-1], bounds[1:]))
    blocks = _blocks_of(parts, num_stages, num_chunks)
    for block in blocks:
        if block.start >= block.end:
            raise ValueError(f"`parts` has a stage without layers, [{block.start}, {block.end}).")
    ends = [0, *(block.end for block in blocks)]
    starts = [*(block.start for block in blocks), num_layers]
    if ends != starts:
        raise ValueError(
            f"`parts` must cover the {num_layers} layers of the model once each, in order, got "
            f"{', '.join(f'[{b.start}, {b.end})' for b in blocks)}."
        )
    return tuple(blocks)


def _blocks_of(parts: Any, num_stages: int, num_chunks: int) -> list[Block]:
    """The intervals in `parts`, in the order of the model."""
    try:
        stages = [
            [Block(operator.index(start), operator.index(end)) for start, end in stage]
            for stage in parts
        ]
    except (TypeError, ValueError):
        stages = []
    if len(stages) != num_stages or any(len(stage) != num_chunks for stage in stages):
        raise ValueError(
            f"`parts` must have {num_chunks} [start, end) for each of the {num_stages} stages of "
            f"`schedule`, got {parts!r}."
        )
    return sorted(block for stage in stages for block in stage)


class Run(NamedTuple):
    """Layers of the model, one after the other, that a stage computes alike.

    Attributes:
      start: the first layer.
      count: the number of layers; 1 for a layer that stands alone.
    """

    start: int
    count: int


def runs_of(layers: Sequence[Any], kinds: Sequence[Any], start: int, end: int) -> tuple[Run, ...]:
    """Return layers `start` to `end`, without `end`, in runs.

    Args:
      layers: functions of the whole model.
      kinds: for each of them what tells its parameters: structure, paths, shapes, dtypes, specs.
      start: the first layer.
      end: behind the last layer.
    """
    found: list[Run] = []
    at = start
    while at < end:
        count = 1
        while at + count < end and _alike(layers, kinds, at, at + count):
            count += 1
        whole = count >= _SHORTEST
        found += [Run(at, count)] if whole else [Run(i, 1) for i in range(at, at + count)]
        at += count
    return tuple(found)


def _alike(layers: Sequence[Any], kinds: Sequence[Any], one: int, other: int) -> bool:
    return kinds[one] == kinds[other] and equal_layers(layers[one], layers[other])


def equal_layers(one: Any, other: Any) -> bool:
    """Whether two layers are the same function."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # objects of others may compare as arrays do
        return False
