"""Packing of trees into flat buffers, by a cached plan, and means of trees through buffers."""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..collectives import all_mean_in_slices, coded_mean, relative_weight, total_weight
from ..mesh import specs_key, typed_specs
from ..tree import Buffer, BufferPlan, leaf_names, note_buffers, plan_buffers
from ._replica_exchange import BlockGroup, Exchange, block_groups

Kind = Literal["leaves", "flat", "whole"]
Flats = list[list[jax.Array]]  # a list of buffers for each group of leaves
OnBuffer = Callable[..., jax.Array]
"""`fn(buffer, flat, *whole)`: called for a flat buffer; a replica's devices have equal `whole`."""


def on_blocks(
    group: BlockGroup,
    fn: Callable[..., Any],
    *args: Any,
    kinds: Sequence[Kind],
    out: Kind | tuple[Kind, ...],
) -> Any:
    """Call `fn` on each device with its blocks of a group of leaves.

    Args:
      group: the group of leaves.
      fn: function of the arguments.
      *args: lists of the group's leaves; flat buffers, which are split over the group's axes along
        their leading dimension; or values that are whole on every device.
      kinds: the kind of each argument.
      out: the kind of the result, or of each result.
    """
    # Map over all automatic axes, including those over which this group is not sharded. Otherwise
    # the compiler would choose layouts of buffers over these, and on CPU (jax 0.10.2, 0.12.0) it
    # aborts on a sum in half precision whose layout it chose.
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes) if mesh.manual_axes else set()
    if not automatic:  # every array is local to this device
        return fn(*args)
    axes = tuple(group.axis_sizes)
    specs: dict[Kind, Any] = {
        "leaves": list(group.specs),
        "flat": P(axes) if axes else P(),
        "whole": P(),
    }
    outs: tuple[Kind, ...] = out if isinstance(out, tuple) else (out,)
    out_specs = tuple(specs[kind] for kind in outs)
    return jax.shard_map(
        fn,
        in_specs=tuple(specs[kind] for kind in kinds),
        out_specs=out_specs if isinstance(out, tuple) else out_specs[0],
        axis_names=automatic,
    )(*args)


def _unchanged(buffer: Buffer, flat: jax.Array) -> jax.Array:
    del buffer
    return flat


class BufferGroup(NamedTuple):
    """Leaves that are sharded over the same axes, and the buffers of each device's blocks.

    Attributes:
      first: number of the group's first buffer among the buffers of the tree.
      leaves: the leaves' positions, specs and shapes.
      plan: plan of the group's buffers.
    """

    first: int
    leaves: BlockGroup
    plan: BufferPlan

    def mapped(self, fn: Callable[..., Any], flats: Sequence[Any], *whole: Any) -> list[Any]:
        """Return `fn(buffer, flat, *whole)` for each buffer."""
        return [fn(b, flat, *whole) for b, flat in zip(self.plan.buffers, flats, strict=True)]


@dataclass(frozen=True)
class TreePacking:
    """A plan by which trees of the same types are packed into flat buffers.

    If leaves are sharded over automatic axes inside a replica, each device has buffers of its local
    blocks, and functions of buffers run on these.

    Attributes:
      treedef: structure of the trees.
      groups: groups of leaves that are sharded over the same axes.
      plans: plan of the buffers of each group.
    """

    treedef: Any
    groups: tuple[BlockGroup, ...]
    plans: tuple[BufferPlan, ...]

    def buffers(self) -> list[Buffer]:
        """Return all buffers, in order."""
        return [buffer for plan in self.plans for buffer in plan.buffers]

    def numbered(self) -> list[BufferGroup]:
        """Return the groups with their plans, in order."""
        counts = [len(plan.buffers) for plan in self.plans]
        firsts = itertools.accumulate(counts[:-1], initial=0)
        return list(map(BufferGroup, firsts, self.groups, self.plans))

    def pack(self, tree: PyTree, fn: OnBuffer = _unchanged, *, role: str | None = None) -> Flats:
        """Pack `tree` and return `fn(buffer, flat)` for every flat buffer.

        Args:
          tree: tree of the planned structure; leaves are cast to the dtypes of the buffers.
          fn: function of a buffer; by default it returns the buffer.
          role: what the buffers are exchanged for, which `note_buffers` reports; None: no report.

        Communication: only that of `fn`.
        """
        return self.each(
            lambda group, blocks: group.mapped(fn, group.plan.pack(blocks)),
            self.leaves(tree, role),
            kinds=["leaves"],
            out="flat",
        )

    def map(self, fn: Callable[..., Any], flats: Flats, *whole: Any) -> list[list[Any]]:
        """Return `fn(buffer, flat, *whole)`, an array or several, for every flat buffer.

        Communication: only that of `fn`.
        """
        kinds: list[Kind] = ["flat", *["whole" for _ in whole]]
        return self.each(
            lambda group, *args: group.mapped(fn, *args), flats, *whole, kinds=kinds, out="flat"
        )

    def unpack(self, flats: Flats, fn: OnBuffer = _unchanged) -> PyTree:
        """Return the tree that is packed in `fn(buffer, flat)` of these buffers, in their dtypes.

        Communication: only that of `fn`.
        """
        leaves = self.each(
            lambda group, flats: group.plan.unpack(group.mapped(fn, flats)),
            flats,
            kinds=["flat"],
            out="leaves",
        )
        return self.tree(leaves)

    def through(self, fn: OnBuffer, tree: PyTree, *whole: Any, role: str | None = None) -> PyTree:
        """Return `tree` with every flat buffer replaced by `fn(buffer, flat, *whole)`; see `pack`.

        Communication: only that of `fn`.
        """

        def exchanged(group: BufferGroup, blocks: list[jax.Array], *whole: Any) -> list[jax.Array]:
            return group.plan.unpack(group.mapped(fn, group.plan.pack(blocks), *whole))

        kinds: list[Kind] = ["leaves", *["whole" for _ in whole]]
        leaves = self.leaves(tree, role)
        return self.tree(self.each(exchanged, leaves, *whole, kinds=kinds, out="leaves"))

    def each(
        self,
        fn: Callable[..., Any],
        *args: Any,
        kinds: Sequence[Kind],
        out: Kind | tuple[Kind, ...],
    ) -> list[Any]:
        """Call `fn(group, ...)` by `on_blocks` for each group, and return the list of results.

        Arguments are lists with an entry for each group, except those of the kind "whole".
        """
        results = []
        for i, group in enumerate(self.numbered()):
            group_args = [
                x if kind == "whole" else x[i] for x, kind in zip(args, kinds, strict=True)
            ]
            fn_of_group = functools.partial(fn, group)
            results.append(on_blocks(group.leaves, fn_of_group, *group_args, kinds=kinds, out=out))
        return results

    def by_group(self, buffers: Sequence[Any]) -> list[list[Any]]:
        """Split a sequence with an entry for each buffer into a list for each group."""
        rest = iter(buffers)
        return [[next(rest) for _ in plan.buffers] for plan in self.plans]

    def leaves(self, tree: PyTree, role: str | None) -> list[list[jax.Array]]:
        """Return the leaves of each group, and report the group's buffers under `role`."""
        # Names are for reports only, and are computed once per plan.
        if role is not None:
            for group, plan in zip(self.groups, self.plans, strict=True):
                note_buffers(role, plan, [self.names[i] for i in group.indices])
        leaves = self.treedef.flatten_up_to(tree)
        return [[leaves[i] for i in group.indices] for group in self.groups]

    def tree(self, by_group: Sequence[Sequence[Any]]) -> PyTree:
        """Return the tree of the leaves of all groups."""
        leaves: list[Any] = [None] * self.treedef.num_leaves
        for group, blocks in zip(self.groups, by_group, strict=True):
            for i, block in zip(group.indices, blocks, strict=True):
                leaves[i] = block
        return self.treedef.unflatten(leaves)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the tree's leaves."""
        return leaf_names(self.treedef.unflatten(range(self.treedef.num_leaves)))


def packing_of(
    tree: PyTree, exchange: Exchange, dtype_of: Callable[[np.dtype], np.dtype] = np.dtype
) -> TreePacking:
    """Return the packing of trees like `tree` for an exchange, from a cache.

    Args:
      tree: tree of arrays or types.
      exchange: the exchange, of which `param_specs` and `bucket_bytes` are used. Without specs,
        layouts over Explicit axes are read from the types.
      dtype_of: function from the dtype of a leaf to the dtype in which it is sent; by default they
        are equal.

    Raises:
      ValueError: specs that do not fit the tree, or an axis that the context's mesh does not have.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # The key has the dtype that is sent, so that parameters in half precision and their float32
    # updates have one plan if both are sent in float32.
    types = tuple((leaf.shape, dtype_of(leaf.dtype)) for leaf in leaves)
    specs = exchange.param_specs
    specs = specs_key(typed_specs(tree) if specs is None else specs)
    # The context's mesh says which axes are manual, and their sizes.
    mesh = jax.sharding.get_abstract_mesh()
    return _planned(treedef, types, specs, exchange.bucket_bytes, mesh)


@functools.lru_cache(maxsize=128)
def _planned(
    treedef: Any,
    types: tuple[tuple[tuple[int, ...], np.dtype], ...],
    specs: Any,
    bucket_bytes: int | None,
    mesh: Hashable,
) -> TreePacking:
    del mesh  # a key for the cache only: `block_groups` reads it from the context
    like = [jax.ShapeDtypeStruct(*each) for each in types]
    structure, leaves = specs
    limits = None if bucket_bytes is None else (bucket_bytes,)
    return planned_by_group(
        treedef,
        like,
        structure.unflatten(leaves),
        lambda blocks, place: plan_buffers(blocks, limits=limits),
    )


def planned_by_group(
    treedef: Any,
    leaves: Sequence[Any],
    specs: PyTree | None,
    plan: Callable[[list[Any], Mapping[int, int]], BufferPlan],
) -> TreePacking:
    """Return the packing of a tree by a plan for each group of leaves sharded over the same axes.

    Args:
      treedef: structure of the tree.
      leaves: the tree's arrays or types.
      specs: `PartitionSpec` per leaf, or prefix of the tree, or None for whole leaves.
      plan: `plan(blocks, place)`: returns the plan for a group, where `blocks` are the types of one
        device's blocks, equal on all devices, and `place` maps the position of a leaf in the tree
        to that of its block in `blocks`.

    Raises:
      ValueError: specs that do not fit the tree, or an axis that the context's mesh does not have.
    """
    groups = tuple(block_groups(treedef.unflatten(leaves), specs))
    plans = []
    for group in groups:
        shapes = zip(group.indices, group.block_shapes(), strict=True)
        blocks = [jax.ShapeDtypeStruct(shape, leaves[i].dtype) for i, shape in shapes]
        plans.append(plan(blocks, {i: k for k, i in enumerate(group.indices)}))
    return TreePacking(treedef, groups, tuple(plans))


def replica_mean(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> PyTree:
    """Return the mean of a tree over the replicas, in the leaves' dtypes, through flat buffers.

    With a weight it is the weighted mean, or `tree` itself if all weights are 0. With a codec each
    replica's residual is added, so replicas then differ by it. `note_buffers` reports `role`, which
    says what the buffers are exchanged for.

    Communication: one all-reduce per buffer over `exchange.axis_name`, in the dtype of a codec that
      narrows it; with `local_axis_name` 1/L of each per device, and an all-gather over that axis;
      with a weight, before, one of 8 bytes. None for a tree without leaves.
    """
    if not jax.tree.leaves(tree):
        return tree
    axes, local = exchange.axis_name, exchange.local_axis_name

    def mean_of(
        buffer: Buffer,
        flat: jax.Array,
        factor: jax.Array | None = None,
        anyone: jax.Array | None = None,
    ) -> jax.Array:
        del buffer
        # Each of L devices inside a replica sends its part: N bytes leave a replica, not L * N.
        if exchange.codec is None:
            mean = all_mean_in_slices(flat, axes, local, factor=factor)
        else:
            mean, residual = coded_mean(flat, exchange.codec, axes, local, factor=factor)
            mean += residual
        # If all replicas have run out of data the mean is 0 / 0: keep the values.
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    return packing_of(tree, exchange).through(mean_of, tree, *_shares(exchange, weight), role=role)


def mean_and_residual(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Return the mean of the replicas' encoded trees, and this replica's residual.

    The residual is the part of the tree that the codec does not send.

    Args:
      tree: tree of floating leaves.
      exchange: an exchange with a codec.
      weight: () number >= 0, this replica's share in the mean; None weighs all replicas equally. A
        replica of weight 0 has no residual. If all weights are 0, the mean is 0.
      role: what the buffers are exchanged for, which `note_buffers` reports; None: no report.

    Communication: only that of `replica_mean`.
    """
    codec, axes, local = exchange.codec, exchange.axis_name, exchange.local_axis_name
    assert codec is not None

    def both(buffer: Buffer, flat: jax.Array, *factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        del buffer
        return coded_mean(flat, codec, axes, local, factor=factor[0] if factor else None)

    packing = packing_of(tree, exchange)
    pairs = packing.map(both, packing.pack(tree, role=role), *_shares(exchange, weight)[:1])
    means = [[mean for mean, _ in group] for group in pairs]
    residuals = [[residual for _, residual in group] for group in pairs]
    return packing.unpack(means), packing.unpack(residuals)


def _shares(exchange: Exchange, weight: jax.Array | None) -> list[jax.Array]:
    """Return this replica's factor, and whether any weight is above 0; [] without weights.

    Communication: with a weight one all-reduce of 8 bytes over `exchange.axis_name`.
    """
    if weight is None:
        return []
    total = total_weight(weight, exchange.axis_name)
    return [relative_weight(weight, total, exchange.axis_name), total.weight > 0]
