"""Partition the layers of a model into stages, by their number or by what they cost."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import as_int, as_number, checked_int, warn_user
from .._support.types import PyTree
from ..tree import check_arrays, tree_bytes
from .model import LayeredModel

Interval = tuple[int, int]
"""A block of layers: index of the first one, and index after the last one."""


def _blocks_by_stage(blocks: Sequence[Interval], num_stages: int) -> list[list[Interval]]:
    """Return the blocks of each stage: block k belongs to stage k % `num_stages`."""
    return [list(blocks[stage::num_stages]) for stage in range(num_stages)]


def _counts(owner: str, num_stages: int, num_chunks: int) -> tuple[int, int]:
    """Return both counts as ints; raise `ValueError` unless they are integers >= 1."""
    counts = {"num_stages": num_stages, "num_chunks": num_chunks}
    num_stages, num_chunks = (checked_int(f"{owner}: `{n}`", x, 1) for n, x in counts.items())
    return num_stages, num_chunks


def _checked_costs(owner: str, name: str, values: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Return what `read`, `as_int` or `as_number`, makes of the costs of all layers.

    Raises:
      ValueError: no cost, or one that is negative or not of this kind.
    """
    is_list = isinstance(values, Iterable) and not isinstance(values, Mapping)
    costs = list(values) if is_list else []
    numbers = [read(x) for x in costs]
    wrong = [i for i, x in enumerate(numbers) if x is None or x < 0]
    if wrong or not costs:
        kind = "an integer" if read is as_int else "a finite number"
        got = ", ".join(f"{costs[i]} for layer {i}" for i in wrong) or repr(values)
        raise ValueError(f"{owner}: `{name}` must hold {kind} >= 0 for each layer, got {got}.")
    return numbers


def partition_uniform(num_items: int, num_stages: int, num_chunks: int = 1) -> list[list[Interval]]:
    """Split layers over stages as evenly as possible.

    Each chunk consists of `num_items / num_chunks` consecutive layers, which are divided among all
    stages. If the number of stages does not divide them, the last stages get one layer more.

    Args:
      num_items: number of layers, >= 1; a multiple of `num_chunks`.
      num_stages: number of stages, >= 1.
      num_chunks: number of blocks that each stage holds, >= 1.

    Returns:
      For each stage a list of half-open intervals `(start, end)`, one per chunk. If a chunk has
      fewer layers than there are stages, the first intervals are empty; `js.partition_by_cost`
      refuses that.

    Raises:
      ValueError: a count below 1, or chunks that do not divide the layers.
      UserWarning: once per chunk in which some stage holds no layer.

    Communication: none.

    Source: ColossalAI (commit 96780e6), `colossalai/builder/pipeline.py`.
    """
    owner = "partition_uniform"
    num_items = checked_int(f"{owner}: `num_items`", num_items, 1)
    num_stages, num_chunks = _counts(owner, num_stages, num_chunks)
    if num_items % num_chunks:
        raise ValueError(
            f"{owner}: the number of layers must be a multiple of `num_chunks`={num_chunks}, got "
            f"{num_items} (js.partition_by_cost takes any)."
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
    return _blocks_by_stage(blocks, num_stages)


def partition_balanced(
    weights: Iterable[int], num_stages: int, num_chunks: int = 1
) -> list[list[Interval]]:
    """Split layers so that the largest block is as small as possible, as ColossalAI does.

    Blocks are filled from the left, up to the smallest capacity with which `num_blocks` suffice. If
    fewer blocks are filled, the heaviest one is split in two as evenly as possible, until there are
    enough. No split has a lighter heaviest block. Of equally good splits `js.partition_by_cost`
    returns a more even one, and it also takes costs that are not integers.

    Args:
      weights: one integer >= 0 per layer, such as from `js.pipeline.count_layer_params`; 0 counts
        as 1.
      num_stages: number of stages, >= 1.
      num_chunks: number of blocks that each stage holds, >= 1.

    Returns:
      For each stage a list of half-open intervals `(start, end)`, one per chunk: block k belongs to
      stage k % `num_stages`. If there are no more layers than blocks, it is the result of
      `js.partition_uniform`.

    Raises:
      ValueError: a count below 1, weights that are negative or not integers; with no more layers
        than blocks, chunks that do not divide the layers.
      UserWarning: the warning of `js.partition_uniform`.

    Communication: none.

    Source: ColossalAI (commit 96780e6), `colossalai/builder/pipeline.py`.
    """
    costs = _checked_costs("partition_balanced", "weights", weights, as_int)
    num_stages, num_chunks = _counts("partition_balanced", num_stages, num_chunks)
    num_blocks = num_stages * num_chunks
    if len(costs) <= num_blocks:
        return partition_uniform(len(costs), num_stages, num_chunks)
    positive = [max(1, w) for w in costs]
    blocks = _fill_blocks(positive, _least_capacity(positive, num_blocks))
    before = [0, *accumulate(positive)]
    return _blocks_by_stage(_split_heaviest(before, blocks, num_blocks), num_stages)


def _least_capacity(weights: Sequence[int], num_blocks: int) -> int:
    """Return the smallest capacity for which `_fill_blocks` returns at most `num_blocks` blocks."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_fill_blocks(weights, middle)) <= num_blocks:
            high = middle
        else:
            low = middle + 1
    return low


def _fill_blocks(weights: Sequence[int], capacity: int) -> list[Interval]:
    """Return blocks filled from the left, each with as many layers as `capacity` allows."""
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
    """Return `num_blocks` blocks, by splitting the heaviest block that has more than one layer.

    `before` has the sum of the weights before each layer.
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
        # The first of several cuts that are equally even.
        cut = min(range(start + 1, end), key=lambda i: abs(whole - 2 * before[i]))
        heapq.heappush(heap, entry(start, cut))
        heapq.heappush(heap, entry(cut, end))
    return sorted([*single, *((start, end) for _, start, end in heap)])


def partition_by_cost(
    costs: Iterable[float], num_stages: int, num_chunks: int = 1
) -> list[list[Interval]]:
    """Split layers into blocks so that the most expensive block is as cheap as possible.

        parts = js.partition_by_cost(js.pipeline.count_layer_params(params), num_stages=4)

    Of several such splits, the result is the one with the smallest sum of squared costs of blocks,
    and of several of these the one whose blocks end first, compared from the left.

    Args:
      costs: one finite number >= 0 per layer: parameters (`js.pipeline.count_layer_params`),
        operations (`js.pipeline.layer_flops`), or measured times. Embedding and loss are layers, or
        parts of layers, and must be counted.
      num_stages: number of stages, >= 1.
      num_chunks: number of blocks that each stage holds, >= 1.

    Returns:
      For each stage a list of half-open intervals `(start, end)`, one per chunk, none of them
      empty: block k belongs to stage k % `num_stages`.

    Raises:
      ValueError: a count below 1; costs that are negative, infinite or NaN; fewer layers than
        blocks, so that a stage would hold none.

    Communication: none. It takes `num_stages * num_chunks * len(costs)**2` additions of doubles,
    in which sums of integers are exact below 2**53: 0.05 s for 512 layers in 64 blocks.
    """
    array = np.array(_checked_costs("partition_by_cost", "costs", costs, as_number))
    num_stages, num_chunks = _counts("partition_by_cost", num_stages, num_chunks)
    num_blocks = num_stages * num_chunks
    if len(array) < num_blocks:
        raise ValueError(
            f"partition_by_cost: `costs` must have a layer for each of `num_stages`={num_stages} "
            f"times `num_chunks`={num_chunks} blocks, got {len(array)} layers."
        )
    return _blocks_by_stage(_min_cost_blocks(array, num_blocks), num_stages)


def blocks_by_bytes(layers: Sequence[PyTree], num_blocks: int) -> list[Interval]:
    """Split layers into blocks so that the block with most bytes of parameters is smallest.

    Args:
      layers: one tree of arrays or types per layer, at least `num_blocks` of them.
      num_blocks: number of blocks, >= 1.

    Returns:
      The blocks, in the order of the model.
    """
    # Each layer costs a byte more, so that layers without parameters are distributed evenly.
    return _min_cost_blocks(np.array([1 + tree_bytes(layer) for layer in layers]), num_blocks)


def _min_cost_blocks(costs: np.ndarray, num_blocks: int) -> list[Interval]:
    """Return the blocks of the best split, as `partition_by_cost` defines it."""
    before = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    index = np.arange(len(before))
    # block[i, j]: the cost of layers i to j - 1; infinity for j < i.
    block = np.where(index > index[:, None], before - before[:, None], np.inf)
    largest = _least_costs(block, num_blocks, np.maximum)[0, num_blocks]
    squares = np.where(block <= largest, block, np.inf) ** 2
    return _trace_blocks(squares, _least_costs(squares, num_blocks, np.add))


def _least_costs(block: np.ndarray, num_blocks: int, combine: np.ufunc) -> np.ndarray:
    """Return `[i, k]`, the least cost of layers from i on in k blocks, or infinity.

    `combine` is `numpy.add` or `numpy.maximum`, of the costs of blocks.
    """
    best = np.full((len(block), num_blocks + 1), np.inf)
    best[-1, 0] = 0.0
    for k in range(1, num_blocks + 1):
        best[:, k] = combine(block, best[:, k - 1]).min(axis=1)
    return best


def _trace_blocks(block: np.ndarray, best: np.ndarray) -> list[Interval]:
    """Return the blocks that attain `best`, with the first of several equally good cuts."""
    start, blocks = 0, []
    for left in range(best.shape[1] - 2, -1, -1):
        end = int(np.argmin(block[start] + best[:, left]))
        blocks.append((start, end))
        start = end
    return blocks


def count_layer_params(layers: Iterable[PyTree]) -> list[int]:
    """Return the number of parameters of each layer, in elements.

        js.partition_balanced(js.pipeline.count_layer_params(params), num_stages=4)

    Args:
      layers: a sequence of one tree of parameters per layer: arrays, `jax.ShapeDtypeStruct`s,
        NumPy arrays, numbers, `nnx.state(layer, nnx.Param)`. PRNG keys, which a whole
        `nnx.state(layer)` may hold, are not counted.

    Returns:
      One int per layer; 0 for a layer without parameters.

    Raises:
      ValueError: `layers` is one tree, or a leaf is not an array.

    Communication: none; only shapes are read.
    """
    if isinstance(layers, Mapping) or hasattr(layers, "shape") or not isinstance(layers, Iterable):
        raise ValueError(
            f"count_layer_params: `layers` must be one tree per layer, got {type(layers).__name__}."
        )
    trees = list(layers)
    for i, tree in enumerate(trees):
        check_arrays(f"count_layer_params: layer {i}", tree)
    return [sum(map(_elements, jax.tree.leaves(tree))) for tree in trees]


def _elements(leaf: Any) -> int:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return 0 if is_key else math.prod(jnp.shape(leaf))


class LayerFlops(NamedTuple):
    """The floating-point operations of a layer for one microbatch."""

    forward: float
    backward: float  # gradients of parameters and input, without those of the forward pass

    @property
    def total(self) -> float:
        """The operations of both passes."""
        return self.forward + self.backward


def layer_flops(
    model: LayeredModel | Sequence[Callable[[PyTree, PyTree], PyTree]],
    params: Sequence[PyTree],
    microbatch: PyTree,
) -> list[LayerFlops]:
    """Return each layer's floating-point operations, from compiled programs that are not run.

        flops = js.pipeline.layer_flops(model, params, microbatch)
        parts = js.partition_by_cost([layer.total for layer in flops], num_stages=4)

    Args:
      model: a `js.LayeredModel`, whose loss is counted with its last layer; or functions
        `layer(params, x) -> x`, of which the last may include a loss.
      params: one tree per layer, of arrays or `jax.ShapeDtypeStruct`s.
      microbatch: the input of the first layer, of arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      One `LayerFlops` per layer, as the compiler of jax's default backend counts the two programs.
      It counts the body of a loop once, and of a table that is looked up only the sum of its
      gradients. Layers that are the same function of the same shapes are compiled once.

    Raises:
      ValueError: no layers, a number of parameter trees that differs from the number of layers,
        leaves that are not arrays.

    Communication: none.
    """
    layers = model.layers if isinstance(model, LayeredModel) else tuple(model)
    if not layers or len(params) != len(layers):
        raise ValueError(
            "layer_flops: `params` must be one tree per layer, and at least one, got "
            f"{len(params)} trees for {len(layers)} layers."
        )
    for i, tree in enumerate(params):
        check_arrays(f"layer_flops: layer {i}", tree)
    batch = _types(microbatch)
    x, flops_of_layers, results = batch, [], {}
    for i, weights in enumerate(map(_types, params)):
        takes = model.takes[i] if isinstance(model, LayeredModel) else ()
        key = layers[i], takes, _key((weights, x)), i == 0, i == len(layers) - 1
        if key not in results:
            results[key] = _count_layer_flops(_layer_fn(model, i), weights, x, batch)
        flops, x = results[key]
        flops_of_layers.append(flops)
    return flops_of_layers


def _layer_fn(model: Any, i: int) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """Return layer `i` as a function (weights, x, batch); the last one includes the loss."""
    if not isinstance(model, LayeredModel):
        return lambda weights, x, batch: model[i](weights, x)
    stage, is_last = model.stage(i, i + 1), i == len(model.layers) - 1

    def compute(weights: PyTree, x: PyTree, batch: PyTree) -> PyTree:
        y = stage((weights,), x, x if i == 0 else batch)
        return y[0] if is_last and isinstance(y, tuple) else y

    return compute


def _count_layer_flops(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree], weights: PyTree, x: PyTree, batch: PyTree
) -> tuple[LayerFlops, PyTree]:
    """Return the operations of a layer, and the types of its result."""
    leaves, treedef = jax.tree.flatten((weights, x))
    inexact = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def forward(leaves: list[Any], batch: PyTree) -> PyTree:
        weights, x = treedef.unflatten(leaves)
        return fn(weights, x, batch)

    def both(leaves: list[Any], batch: PyTree, cotangents: list[Any]) -> Any:
        def outputs(inexact_leaves: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = list(leaves)
            for i, leaf in zip(inexact, inexact_leaves, strict=True):
                whole[i] = leaf
            results = jax.tree.leaves(forward(whole, batch))
            return list(filter(_is_inexact, results)), results

        _, pull, results = jax.vjp(outputs, [leaves[i] for i in inexact], has_aux=True)
        return results, pull(cotangents)

    y = jax.eval_shape(forward, leaves, batch)
    cotangents = list(filter(_is_inexact, jax.tree.leaves(y)))
    forward_flops = _count_flops(forward, leaves, batch)
    backward_flops = _count_flops(both, leaves, batch, cotangents) - forward_flops
    return LayerFlops(forward_flops, max(0.0, backward_flops)), y


def _count_flops(fn: Callable[..., Any], *types: Any) -> float:
    costs = jax.jit(fn).lower(*types).compile().cost_analysis()
    return max(0.0, float((costs or {}).get("flops", 0.0)))


def _types(tree: PyTree) -> PyTree:
    """Return shapes and dtypes of a tree, without values and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _key(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
