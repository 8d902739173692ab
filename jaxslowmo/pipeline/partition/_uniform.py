"""Equally many layers for each stage."""

from ..._support.warnings import warn_user
from ._blocks import Interval, check_count, dealt


def partition_uniform(num_items: int, num_stages: int, num_chunks: int = 1) -> list[list[Interval]]:
    """Layers split evenly over stages, the same number or one more on each.

    Each chunk covers `num_items / num_chunks` consecutive layers, over all stages; what does not
    divide by the number of stages goes to the last ones, one layer more each.

    Args:
      num_items: layers, >= 1; a multiple of `num_chunks`.
      num_stages: >= 1.
      num_chunks: blocks that each stage holds, >= 1.

    Returns:
      Per stage a list of half-open intervals `(start, end)`, one per chunk. Where there are fewer
      layers in a chunk than stages the first intervals are empty: `js.partition_by_cost` refuses
      that.

    Raises:
      ValueError: a count below 1, or chunks that do not divide the layers.
      UserWarning: once per chunk in which some stage holds no layer.

    Communication: none.

    Source: ColossalAI (commit 96780e6), `colossalai/builder/pipeline.py`.
    """
    owner = "partition_uniform"
    num_items = check_count(owner, "num_items", num_items)
    num_stages = check_count(owner, "num_stages", num_stages)
    num_chunks = check_count(owner, "num_chunks", num_chunks)
    return uniform(owner, num_items, num_stages, num_chunks)


def uniform(owner: str, num_items: int, num_stages: int, num_chunks: int) -> list[list[Interval]]:
    """See `partition_uniform`; `owner` is named in errors."""
    if num_items % num_chunks:
        raise ValueError(
            f"{owner}: the number of layers must be a multiple of `num_chunks`={num_chunks}, got "
            f"{num_items} layers. js.partition_by_cost takes any number."
        )
    per_chunk = num_items // num_chunks
    base, rest = divmod(per_chunk, num_stages)
    blocks: list[Interval] = []
    for chunk in range(num_chunks):
        if not base:
            warn_user(
                f"{owner}: {num_stages - rest} of {num_stages} stages hold no layer in chunk "
                f"{chunk}, which has {per_chunk}."
            )
        end = chunk * per_chunk
        for stage in range(num_stages):
            start, end = end, end + base + (stage >= num_stages - rest)
            blocks.append((start, end))
    return dealt(blocks, num_stages)
