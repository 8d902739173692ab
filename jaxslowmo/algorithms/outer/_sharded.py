"""Anchors of which each replica keeps 1/R, as `(rows, lanes)` float32 shards of flat buffers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.types import AxisName, PyTree
from ...collectives import ShardLayout, all_gather_shards, mean_to_shards, own_shard, shard_layout
from ...mesh import axis_size
from ...transform import (
    BlockGroup,
    Exchange,
    Flats,
    StatePlacement,
    TreePacking,
    on_blocks,
    packing_of,
)
from ...tree import Buffer, at_least_float32
from ._anchor import Anchor, of_form
from ._on_host import join_shards, shard_types, split_shards


def shard_packing(params: PyTree, exchange: Exchange) -> TreePacking:
    """The one plan of the shards, on devices and on the host: leaves in at least float32.

    Leaves that are sharded over the same axes inside the replica share buffers; without
    `param_specs` all do.
    """
    return packing_of(params, exchange, at_least_float32)


@dataclasses.dataclass(frozen=True)
class ShardedAnchor(Anchor):
    """The anchor is a tuple with this replica's shard of every buffer."""

    exchange: Exchange
    is_sharded = True

    def layout(self, buffer: Buffer) -> ShardLayout:
        """Shape of a shard."""
        # Replicas hold 1/R each; inside one, L devices hold that shard alike and exchange 1/L of
        # its rows each, so rows must split evenly.
        shards, local = axis_size(self.exchange.axis_name), self.exchange.local_axis_name
        parts = 1 if local is None else axis_size(local)
        return shard_layout(buffer.num_elements, shards, num_parts=parts)

    def store(self, params: PyTree) -> tuple[jax.Array, ...]:
        """This replica's shards of given parameters.

        Communication: none.
        """

        # All replicas start from the same parameters, so each takes its part of its own copy.
        def shard(buffer: Buffer, flat: jax.Array) -> jax.Array:
            return own_shard(flat, self.layout(buffer), self.exchange.axis_name)

        return _joined(shard_packing(params, self.exchange).pack(params, shard))

    def like_stored(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Zeros like that, without packing anything."""
        packing = shard_packing(params, self.exchange)

        def zeros(buffer: Buffer) -> jax.Array:
            layout = self.layout(buffer)
            return jnp.zeros((layout.rows, layout.lanes), buffer.dtype)

        return _joined(
            packing.each(lambda group: [zeros(b) for b in group.plan.buffers], kinds=(), out="flat")
        )

    def average(self, y: PyTree) -> tuple[jax.Array, ...]:
        """This replica's shards of the mean of `y` over the replicas.

        Communication: one reduce-scatter of N bytes over the replica axis per buffer; see
          `mean_to_shards`.
        """
        axes, local = self.exchange.axis_name, self.exchange.local_axis_name

        # Reduce-scatter: the first half of an all-reduce. The outer step runs on the shards in
        # between, and `restore` is the second half, so both together cost one all-reduce.
        def mean(buffer: Buffer, flat: jax.Array) -> jax.Array:
            return mean_to_shards(flat, self.layout(buffer), axes, local)

        return _joined(shard_packing(y, self.exchange).pack(y, mean, role="slow"))

    def restore(self, anchor: tuple[jax.Array, ...], params: PyTree) -> PyTree:
        """Float32 values in the shape of the parameters.

        Communication: one all-gather of N bytes over the replica axis per buffer; see
          `all_gather_shards`.
        """
        axes, local = self.exchange.axis_name, self.exchange.local_axis_name
        packing = shard_packing(params, self.exchange)

        def whole(buffer: Buffer, shard: jax.Array) -> jax.Array:
            return all_gather_shards(shard, buffer.num_elements, axes, local)

        return packing.unpack(packing.by_group(anchor), whole)

    def pin(self, state: PyTree, params: PyTree) -> PyTree:
        """Zeros that an outer optimizer makes have no layout of their own yet.

        Communication: none.
        """
        packing = shard_packing(params, self.exchange)
        # Shards of one group are split over the axes that its leaves are split over: known by their
        # shape, as the optimizer's state holds them among other arrays.
        group_of: dict[tuple[int, ...], BlockGroup] = {
            (group.num_blocks * layout.rows, layout.lanes): group
            for group, plan in zip(packing.groups, packing.plans, strict=True)
            for layout in map(self.layout, plan.buffers)
        }

        def place(x: jax.Array) -> jax.Array:
            if x.shape not in group_of:
                return x
            return on_blocks(group_of[x.shape], lambda y: y, x, kinds=("flat",), out="flat")

        return jax.tree.map(place, state)

    def join(self, anchor: Any, params: PyTree, old: StatePlacement) -> PyTree:
        """The whole tree that the shards are of; see `join_shards`."""
        whole = join_shards(anchor, self._packing_on(old, params), old, self._local)
        # From here on it is like the parameters of now, for whom it will be split.
        return whole if old.form is None else old.form.convert(whole)

    def split(self, tree: PyTree, params: PyTree, new: StatePlacement) -> tuple[Any, ...]:
        """The inverse of `join`."""
        return split_shards(tree, self._packing_on(new, params), new, self._local)

    def like_on(self, anchor: PyTree, params: PyTree, at: StatePlacement, tree: PyTree) -> PyTree:
        """See `Anchor.like_on`."""
        shards = shard_types(self._packing_on(at, params), at, self._local)
        # What the outer optimizer keeps for shards (momentum) is cut as they are.
        is_shards = of_form(anchor)
        return jax.tree.map(lambda x: shards if is_shards(x) else x, tree, is_leaf=is_shards)

    @property
    def _local(self) -> AxisName | None:
        return self.exchange.local_axis_name

    def _packing_on(self, at: StatePlacement, params: PyTree) -> TreePacking:
        """The plan of the shards as it is made on the devices of a mesh, which may be gone."""
        exchange = self.exchange
        # Shards of parameters of another form: what is joined of them is converted.
        if at.form is not None:
            params = at.form.params
        # As it was cut there, whatever this transform would cut by.
        if at.specs is not None:
            specs = jax.tree.structure(params).unflatten(at.specs)
            exchange = dataclasses.replace(exchange, param_specs=specs)
        with jax.sharding.use_abstract_mesh(at.mesh()):
            return shard_packing(params, exchange)


def _joined(by_group: Flats) -> tuple[jax.Array, ...]:
    return tuple(x for own in by_group for x in own)
