"""Gradients of leaves that are one parameter, summed over the stages that hold a copy."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from ..._typing import PyTree
from ...tree import leaf_names
from ..model import Block


class Copy(NamedTuple):
    """Where a copy of a tied leaf lies: its stage of the model, its position among the leaves."""

    stage: int
    position: int


Copies = tuple[tuple[Copy, ...], ...]
"""Groups of copies of one parameter; the first of a group stands for it where it counts once."""


def copies_of(
    tied: Sequence[Sequence[tuple[int, str]]], blocks: Sequence[Block], params: Sequence[PyTree]
) -> Copies:
    """Groups of (layer, path) by where they lie."""

    def where(layer: int, path: str) -> Copy:
        stage = next(k for k, block in enumerate(blocks) if block.start <= layer < block.end)
        before = [len(jax.tree.leaves(params[i])) for i in range(blocks[stage].start, layer)]
        return Copy(stage, sum(before) + leaf_names(params[layer]).index(path))

    return tuple(tuple(where(*leaf) for leaf in group) for group in tied)


def sum_over_copies(groups: Copies, grads: Sequence[PyTree]) -> list[PyTree]:
    """`grads` of the stages of the model, with every copy's gradient the sum over its group.

    Added in one order everywhere, so that copies get equal bits.

    Communication: per group and copy one transfer of the leaf from each of the other copies.
    """
    leaves, trees = zip(*map(jax.tree.flatten, grads), strict=True)
    summed = [list(of_stage) for of_stage in leaves]
    for group in groups:
        own = [leaves[copy.stage][copy.position] for copy in group]
        for copy, there in zip(group, own, strict=True):
            mesh = there.sharding.mesh
            put = [jax.device_put(x, NamedSharding(mesh, x.sharding.spec)) for x in own]
            summed[copy.stage][copy.position] = _sum(put)
    return [tree.unflatten(of_stage) for tree, of_stage in zip(trees, summed, strict=True)]


@jax.jit
def _sum(parts: list[jax.Array]) -> jax.Array:
    return sum(parts[1:], start=parts[0])
