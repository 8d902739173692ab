"""Which layers of a model each stage holds: blocks of consecutive layers, dealt to stages."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._support.checks import checked_int, warn_user
from ..._support.types import PyTree
from ...tree import tree_bytes

Interval = tuple[int, int]
"""A block of layers: the first, and the one after the last."""


def _dealt(blocks: Sequence[Interval], num_stages: int) -> list[list[Interval]]:
    """Per stage its blocks: block k belongs to stage k % `num_stages`."""
    return [list(blocks[stage::num_stages]) for stage in range(num_stages)]


def _counts(owner: str, num_stages: int, num_chunks: int) -> tuple[int, int]:
    """Return both counts as ints; raise `ValueError` unless they are integers >= 1."""
    counts = {"num_stages": num_stages, "num_chunks": num_chunks}
    num_stages, num_chunks = (checked_int(f"{owner}: `{n}`", x, 1) for n, x in counts.items())
    return num_stages, num_chunks


def _check_costs(owner: str, name: str, values: Iterable[Any]) -> np.ndarray:
    """One finite number >= 0 per layer, as a 1-D array of integers or doubles."""
    try:
        if isinstance(values, Mapping):
            raise TypeError
        found = np.asarray(values if hasattr(values, "__array__") else list(values))
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.dtype == jnp.bfloat16:  # no float to NumPy
        found = found.astype(np.float32)
    is_number = found.dtype.kind in "iuf"
    if found.ndim != 1 or not found.size or not is_number:
        raise ValueError(f"{owner}: `{name}` must hold one number per layer, got {values!r}.")
    wrong = [i for i, x in enumerate(found.tolist()) if not 0 <= x < float("inf")]
    if wrong:
        raise ValueError(
            f"{owner}: `{name}` must be finite and >= 0, got "
            f"{', '.join(f'{found[i]} for layer {i}' for i in wrong)}."
        )
    return found


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
    num_items = checked_int(f"{owner}: `num_items`", num_items, 1)
    num_stages, num_chunks = _counts(owner, num_stages, num_chunks)
    return _uniform(owner, num_items, num_stages, num_chunks)


def _uniform(owner: str, num_items: int, num_stages: int, num_chunks: int) -> list[list[Interval]]:
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
    return _dealt(blocks, num_stages)


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
    found = _check_costs(owner, "weights", weights)
    if found.dtype.kind == "f":
        raise ValueError(
            f"{owner}: `weights` must be integers, got {found.dtype} numbers: js.partition_by_cost "
            "takes any costs."
        )
    num_stages, num_chunks = _counts(owner, num_stages, num_chunks)
    num_blocks = num_stages * num_chunks
    if len(found) <= num_blocks:
        return _uniform(owner, len(found), num_stages, num_chunks)
    # Python's integers: sums of NumPy's might overflow.
    positive = [max(1, w) for w in found.tolist()]
    blocks = _filled(positive, _least_capacity(positive, num_blocks))
    before = [0, *accumulate(positive)]
    return _dealt(_split_heaviest(before, blocks, num_blocks), num_stages)


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


def partition_by_cost(
    costs: Iterable[float], num_stages: int, num_chunks: int = 1
) -> list[list[Interval]]:
    """The best split of layers into blocks: no other has a cheaper most expensive block.

        parts = js.partition_by_cost(js.pipeline.count_layer_params(params), num_stages=4)

    Of the splits that are best in this the blocks are those whose squared costs have the smallest
    sum, and of these the ones that end first, compared from the left.

    Args:
      costs: one finite number >= 0 per layer: parameters (`js.pipeline.count_layer_params`),
        operations (`js.pipeline.layer_flops`), measured times. Embedding and loss are layers, or
        parts of them, and count.
      num_stages: >= 1.
      num_chunks: blocks that each stage holds, >= 1.

    Returns:
      Per stage a list of half-open intervals `(start, end)`, one per chunk, none of them empty:
      block k belongs to stage k % `num_stages`.

    Raises:
      ValueError: a count below 1; costs that are negative, infinite or NaN; fewer layers than
        blocks, so that a stage would hold none.

    Communication: none. It takes `num_stages * num_chunks * len(costs)**2` additions of doubles,
    in which sums of integers are exact below 2**53: 0.05 s for 512 layers in 64 blocks.
    """
    found = _check_costs("partition_by_cost", "costs", costs)
    num_stages, num_chunks = _counts("partition_by_cost", num_stages, num_chunks)
    num_blocks = num_stages * num_chunks
    if len(found) < num_blocks:
        raise ValueError(
            "partition_by_cost: every stage must hold a layer in each chunk, got "
            f"{len(found)} layers for `num_stages`={num_stages} times `num_chunks`={num_chunks}."
        )
    return _dealt(_cheapest(found, num_blocks), num_stages)


def blocks_by_bytes(layers: Sequence[PyTree], num_blocks: int) -> list[Interval]:
    """Return the blocks of layers, in the order of the model, of which the largest is smallest.

    Args:
      layers: one tree of arrays or types per layer, at least `num_blocks` of them.
      num_blocks: the number of blocks, >= 1; their sizes are bytes of parameters.
    """
    # Layers without parameters are dealt out evenly.
    return _cheapest(np.array([1 + tree_bytes(layer) for layer in layers]), num_blocks)


def _cheapest(costs: np.ndarray, num_blocks: int) -> list[Interval]:
    """Return the blocks of the split that `partition_by_cost` calls the best."""
    before = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    index = np.arange(len(before))
    # What layers i to j - 1 cost; nothing that ends before it begins.
    block = np.where(index > index[:, None], before - before[:, None], np.inf)
    largest = _best(block, num_blocks, np.maximum)[0, num_blocks]
    squares = np.where(block <= largest, block, np.inf) ** 2
    return _cuts(squares, _best(squares, num_blocks, np.add))


def _best(block: np.ndarray, num_blocks: int, joined: np.ufunc) -> np.ndarray:
    """`[i, k]`: what layers i and later come to in k blocks, at best; else infinity."""
    best = np.full((len(block), num_blocks + 1), np.inf)
    best[-1, 0] = 0.0
    for k in range(1, num_blocks + 1):
        best[:, k] = joined(block, best[:, k - 1]).min(axis=1)
    return best


def _cuts(block: np.ndarray, best: np.ndarray) -> list[Interval]:
    """The blocks whose sum is `best`; the first cut of several that are equal."""
    start, blocks = 0, []
    for left in range(best.shape[1] - 2, -1, -1):
        end = int(np.argmin(block[start] + best[:, left]))
        blocks.append((start, end))
        start = end
    return blocks
