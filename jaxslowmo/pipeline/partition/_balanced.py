"""Layers by their weights, as ColossalAI splits them."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ._blocks import Interval, check_costs, check_count, dealt
from ._uniform import uniform


def partition_balanced(
    weights: Iterable[int], num_stages: int, num_chunks: int = 1
) -> list[list[Interval]]:
    """Layers split so that the heaviest block is light, by ColossalAI's rule.

    Blocks are filled from the left up to the smallest capacity for which there are enough of them.
    Where fewer are filled than wanted, the heaviest is split in two as evenly as possible, as often
    as needed. No split has a lighter heaviest block; of those that are as good
    `js.partition_by_cost` takes an evener one, and it takes costs that are no integers.

    Args:
      weights: one integer >= 0 per layer, such as `js.pipeline.count_layer_params` gives; 0 counts
        as 1.
      num_stages: >= 1.
      num_chunks: blocks that each stage holds, >= 1.

    Returns:
      Per stage a list of half-open intervals `(start, end)`, one per chunk: block k belongs to
      stage k % `num_stages`. With no more layers than blocks it is that of `js.partition_uniform`.

    Raises:
      ValueError: a count below 1, weights that are no integers or negative; with no more layers
        than blocks, chunks that do not divide the layers.
      UserWarning: that of `js.partition_uniform`.

    Communication: none.

    Source: ColossalAI (commit 96780e6), `colossalai/builder/pipeline.py`.
    """
    owner = "partition_balanced"
    found = check_costs(owner, "weights", weights)
    if found.dtype.kind == "f":
        raise ValueError(
            f"{owner}: `weights` must be integers, got {found.dtype} numbers: js.partition_by_cost "
            "takes any costs."
        )
    num_stages = check_count(owner, "num_stages", num_stages)
    num_chunks = check_count(owner, "num_chunks", num_chunks)
    num_blocks = num_stages * num_chunks
    if len(found) <= num_blocks:
        return uniform(owner, len(found), num_stages, num_chunks)
    # Python's integers: sums of NumPy's might overflow.
    positive = [max(1, w) for w in found.tolist()]
    blocks = _filled(positive, _least_capacity(positive, num_blocks))
    before = [0, *accumulate(positive)]
    return dealt(_split_heaviest(before, blocks, num_blocks), num_stages)


def _least_capacity(weights: Sequence[int], num_blocks: int) -> int:
    """The smallest capacity for which `_filled` makes at most `num_blocks`."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(weights, middle)) <= num_blocks:
            high = middle
        else:
            low = middle + 1
    return low


def _filled(weights: Sequence[int], capacity: int) -> list[Interval]:
    """Blocks from the left, each with as many layers as it holds."""
    blocks, start, load = [], 0, 0
    for i, weight in enumerate(weights):
        if load + weight > capacity:
            blocks.append((start, i))
            start, load = i, 0
        load += weight
    return [*blocks, (start, len(weights))]


def _split_heaviest(
    before: Sequence[int], blocks: Sequence[Interval], num_blocks: int
) -> list[Interval]:
    """As many blocks as wanted, by splitting the heaviest that has more than one layer.

    `before` are sums of the weights before each layer.
    """

    def entry(start: int, end: int) -> tuple[int, int, int]:
        return before[start] - before[end], start, end

    single: list[Interval] = []
    heap = [entry(*block) for block in blocks]
    heapq.heapify(heap)
    while len(single) + len(heap) < num_blocks:
        _, start, end = heapq.heappop(heap)
        if end - start == 1:
            single.append((start, end))
            continue
        whole = before[start] + before[end]
        # The first of several that are equally even.
        cut = min(range(start + 1, end), key=lambda i: abs(whole - 2 * before[i]))
        heapq.heappush(heap, entry(start, cut))
        heapq.heappush(heap, entry(cut, end))
    return sorted([*single, *((start, end) for _, start, end in heap)])
