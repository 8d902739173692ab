"""A tree as flat buffers that stay flat between several collectives on them."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._typing import PyTree
from ..tree import note_buffers, plan_buffers
from ._blocks import BlockGroup, Kind, block_groups, bucket_limits

Flats = list[list[jax.Array]]  # per group of leaves that are sharded alike


class Packing:
    """How trees like `like` become flat buffers, one per dtype or several of `bucket_bytes`.

    Where leaves are sharded over automatic axes inside a replica (`param_specs`), each device has
    buffers of its own blocks.
    """

    def __init__(self, like: PyTree, param_specs: PyTree | None, bucket_bytes: int | None) -> None:
        self._like = like
        self._groups: list[BlockGroup] = block_groups(like, param_specs)
        self._limits = bucket_limits(bucket_bytes)

    def pack(self, tree: PyTree) -> Flats:
        """Flat buffers in the dtypes of `like`; no communication."""

        def pack_blocks(
            names: list[str], blocks: list[jax.Array], like: list[Any]
        ) -> list[jax.Array]:
            plan = plan_buffers(like, limits=self._limits)
            note_buffers("round", plan, names)
            return plan.pack(blocks)

        return [
            group.on_blocks(
                functools.partial(pack_blocks, group.names(self._like)),
                group.take(tree),
                group.take(self._like),
                kinds=("leaves", "leaves"),
                out="flat",
            )
            for group in self._groups
        ]

    def map(self, fn: Callable[..., jax.Array], flats: Flats, *whole: Any) -> Flats:
        """`fn(flat, *whole)` of every buffer; `whole` are arrays that a replica's devices share."""

        def on_buffers(buffers: list[jax.Array], *whole: Any) -> list[jax.Array]:
            return [fn(flat, *whole) for flat in buffers]

        kinds: list[Kind] = ["flat", *["whole" for _ in whole]]
        return [
            group.on_blocks(on_buffers, buffers, *whole, kinds=kinds, out="flat")
            for group, buffers in zip(self._groups, flats, strict=True)
        ]

    def unpack(self, flats: Flats) -> PyTree:
        """The tree, in the dtypes of the buffers; no communication."""

        def unpack_blocks(buffers: list[jax.Array], like: list[Any]) -> list[jax.Array]:
            return plan_buffers(like, limits=self._limits).unpack(buffers)

        leaves, treedef = jax.tree.flatten(self._like)
        for group, buffers in zip(self._groups, flats, strict=True):
            blocks = group.on_blocks(
                unpack_blocks,
                buffers,
                group.take(self._like),
                kinds=("flat", "leaves"),
                out="leaves",
            )
            for i, block in zip(group.indices, blocks, strict=True):
                leaves[i] = block
        return treedef.unflatten(leaves)
