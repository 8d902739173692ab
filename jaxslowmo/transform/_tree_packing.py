"""A tree as flat buffers: planned once, packed, exchanged, taken apart again; their mean."""

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
Flats = list[list[jax.Array]]  # per group of leaves that are sharded alike
OnBuffer = Callable[..., jax.Array]
"""`fn(buffer, flat, *whole)`: of one flat buffer; `whole` are alike on a replica's devices."""


def on_blocks(
    group: BlockGroup,
    fn: Callable[..., Any],
    *args: Any,
    kinds: Sequence[Kind],
    out: Kind | tuple[Kind, ...],
) -> Any:
    """`fn` of the device's own blocks of a group of leaves.

    Args:
      group: of which leaves.
      fn: function of the arguments.
      *args: lists of the group's leaves; flat buffers, which are split over all axes along their
        leading dimension; or values that are whole on every device.
      kinds: which of these each argument is.
      out: likewise for the result.
    """
    # Along all axes that the compiler has, those too over which this group is not sharded: there it
    # would lay out the buffers as it likes, and on CPU (jax 0.10.2, 0.12.0) it aborts on a sum of
    # half precision that it lays out.
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes) if mesh.manual_axes else set()
    if not automatic:  # every array is this device's own
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


def _as_it_is(buffer: Buffer, flat: jax.Array) -> jax.Array:
    del buffer
    return flat


class BufferGroup(NamedTuple):
    """Leaves that are sharded alike inside a replica, and the buffers of each device's blocks.

    Attributes:
      first: number of the first buffer.
      leaves: which these are.
      plan: of the buffers.
    """

    first: int
    leaves: BlockGroup
    plan: BufferPlan

    def mapped(self, fn: Callable[..., Any], flats: Sequence[Any], *whole: Any) -> list[Any]:
        """`fn(buffer, flat, *whole)` of each buffer."""
        return [fn(b, flat, *whole) for b, flat in zip(self.plan.buffers, flats, strict=True)]


@dataclass(frozen=True)
class TreePacking:
    """How trees of one kind become flat buffers.

    Where leaves are sharded over automatic axes inside a replica, each device has buffers of its
    own blocks, and everything here runs on those.

    Attributes:
      treedef: of the trees.
      groups: of leaves that are sharded alike.
      plans: of the buffers, one per group.
    """

    treedef: Any
    groups: tuple[BlockGroup, ...]
    plans: tuple[BufferPlan, ...]

    def buffers(self) -> list[Buffer]:
        """All buffers, in order."""
        return [buffer for plan in self.plans for buffer in plan.buffers]

    def numbered(self) -> list[BufferGroup]:
        """The groups, in order."""
        counts = [len(plan.buffers) for plan in self.plans]
        firsts = itertools.accumulate(counts[:-1], initial=0)
        return list(map(BufferGroup, firsts, self.groups, self.plans))

    def pack(self, tree: PyTree, fn: OnBuffer = _as_it_is, *, role: str | None = None) -> Flats:
        """`fn` of every flat buffer of `tree`.

        Args:
          tree: as it was planned; leaves are cast to the dtypes of the buffers.
          fn: of one buffer.
          role: what the buffers are exchanged for, told to who listens (`note_buffers`).

        Communication: that of `fn`.
        """
        return self.each(
            lambda own, blocks: own.mapped(fn, own.plan.pack(blocks)),
            self.leaves(tree, role),
            kinds=["leaves"],
            out="flat",
        )

    def map(self, fn: Callable[..., Any], flats: Flats, *whole: Any) -> list[list[Any]]:
        """`fn` of every flat buffer, an array or several.

        Communication: that of `fn`.
        """
        kinds: list[Kind] = ["flat", *["whole" for _ in whole]]
        return self.each(
            lambda own, *args: own.mapped(fn, *args), flats, *whole, kinds=kinds, out="flat"
        )

    def unpack(self, flats: Flats, fn: OnBuffer = _as_it_is) -> PyTree:
        """The tree of which the flat buffers are `fn` of these, in their dtypes.

        Communication: that of `fn`.
        """
        leaves = self.each(
            lambda own, flats: own.plan.unpack(own.mapped(fn, flats)),
            flats,
            kinds=["flat"],
            out="leaves",
        )
        return self.tree(leaves)

    def through(self, fn: OnBuffer, tree: PyTree, *whole: Any, role: str | None = None) -> PyTree:
        """`tree` with every flat buffer replaced by `fn` of it; see `pack`.

        Communication: that of `fn`.
        """

        def exchanged(own: BufferGroup, blocks: list[jax.Array], *whole: Any) -> list[jax.Array]:
            return own.plan.unpack(own.mapped(fn, own.plan.pack(blocks), *whole))

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
        """`fn(group, ...)` of each group and its blocks, as `on_blocks` calls it.

        Arguments are lists with an entry for each group, but for those that are whole.
        """
        found = []
        for i, group in enumerate(self.numbered()):
            own = [x if kind == "whole" else x[i] for x, kind in zip(args, kinds, strict=True)]
            one = functools.partial(fn, group)
            found.append(on_blocks(group.leaves, one, *own, kinds=kinds, out=out))
        return found

    def by_group(self, buffers: Sequence[Any]) -> list[list[Any]]:
        """What there is for each buffer, as a list for each group."""
        rest = iter(buffers)
        return [[next(rest) for _ in plan.buffers] for plan in self.plans]

    def leaves(self, tree: PyTree, role: str | None) -> list[list[jax.Array]]:
        """Leaves of each group, on their way into buffers."""
        # Who listens wants names; they are made once per plan.
        if role is not None:
            for group, plan in zip(self.groups, self.plans, strict=True):
                note_buffers(role, plan, [self.names[i] for i in group.indices])
        leaves = self.treedef.flatten_up_to(tree)
        return [[leaves[i] for i in group.indices] for group in self.groups]

    def tree(self, by_group: Sequence[Sequence[Any]]) -> PyTree:
        """The tree of the leaves of all groups."""
        leaves: list[Any] = [None] * self.treedef.num_leaves
        for group, blocks in zip(self.groups, by_group, strict=True):
            for i, block in zip(group.indices, blocks, strict=True):
                leaves[i] = block
        return self.treedef.unflatten(leaves)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the tree's leaves."""
        return leaf_names(self.treedef.unflatten(range(self.treedef.num_leaves)))


def packing_of(
    tree: PyTree, exchange: Exchange, dtype_of: Callable[[np.dtype], np.dtype] = np.dtype
) -> TreePacking:
    """How trees like `tree` are packed for an exchange; planned once for each kind of tree.

    Args:
      tree: arrays or types.
      exchange: of which `param_specs` (else the types, over Explicit axes) and `bucket_bytes` hold.
      dtype_of: dtype that a leaf of a given dtype travels in.

    Raises:
      ValueError: specs that don't fit the tree, or an axis that the mesh here does not have.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # By the dtype on the way, so that parameters in half precision and their float32 updates have
    # one plan where both travel in float32.
    types = tuple((leaf.shape, dtype_of(leaf.dtype)) for leaf in leaves)
    specs = exchange.param_specs
    specs = specs_key(typed_specs(tree) if specs is None else specs)
    # Axes are manual, and sizes known, by the mesh of the place where this is asked.
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
    del mesh  # the one that `block_groups` asks for
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
    """How a tree is packed, of a plan for each group of leaves that are sharded alike.

    Args:
      treedef: of the tree.
      leaves: its arrays or types.
      specs: as `block_groups` takes them.
      plan: `plan(blocks, place)` of the types of one device's blocks, which are alike on all, and
        of their places by the positions of their leaves in the tree.

    Raises:
      ValueError: as `block_groups`.
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
    """Mean of a tree over the replicas, through flat buffers, in the leaves' dtypes.

    With a weight it is the weighted mean; where all weights are 0, the tree as it is. With a codec
    each replica's residual is on top, by which replicas then differ. `role` names what the buffers
    are exchanged for, to those who listen (`note_buffers`).

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
        # With devices inside a replica each moves its part: N bytes leave a replica, not L * N.
        if exchange.codec is None:
            mean = all_mean_in_slices(flat, axes, local, factor=factor)
        else:
            mean, residual = coded_mean(flat, exchange.codec, axes, local, factor=factor)
            mean += residual
        # Where all have run out of data the mean is 0 / 0: all stay as they are.
        return mean if anyone is None else jnp.where(anyone, mean, flat)

    return packing_of(tree, exchange).through(mean_of, tree, *_shares(exchange, weight), role=role)


def mean_and_residual(
    tree: PyTree,
    exchange: Exchange,
    weight: jax.Array | None = None,
    *,
    role: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Mean of what travels of the replicas' trees, and what of this replica's does not.

    Args:
      tree: floating leaves.
      exchange: with a codec.
      weight: as in `replica_mean`. A replica of weight 0 has no residual; where all weights are 0,
        so is the mean.
      role: as in `replica_mean`.

    Communication: as `replica_mean`.
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
    """This replica's factor, and whether any replica weighs more than 0; [] without weights.

    Communication: with a weight one all-reduce of 8 bytes over `exchange.axis_name`.
    """
    if weight is None:
        return []
    total = total_weight(weight, exchange.axis_name)
    return [relative_weight(weight, total, exchange.axis_name), total.weight > 0]
