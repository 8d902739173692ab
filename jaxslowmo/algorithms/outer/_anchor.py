"""The storage of slow state: equal on all replicas, different on each, or sharded over them.

The outer step is the same for all three. An anchor class defines how the anchor is stored, how the
average of the replicas is brought into that form, and how parameters are restored from it.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._support.types import AxisName, PyTree
from ...collectives import (
    ShardLayout,
    all_gather_shards,
    local_shard,
    mean_to_shards,
    mean_to_shards_in_codec,
    shard_layout,
)
from ...collectives.codecs import Codec
from ...mesh import axis_size
from ...transform import (
    Exchange,
    StatePlacement,
    carry_leaf,
    mean_of_parts,
    packing_of,
    replica_average,
    replica_mean,
    stacked,
    wide_types_on,
)
from ...tree import Buffer, TreePacking, added, at_least_float32, replaced, subtracted


@dataclass(frozen=True)
class Anchor:
    """A whole anchor on every replica, a float32 tree like the parameters.

    Attributes:
      exchange: axes over which replicas average, so that their anchors are equal. None: every
        replica has a different anchor, and `join` returns their mean.
      is_sharded: whether `store` needs the replica axis, to select this replica's shard.
    """

    exchange: Exchange | None
    is_sharded: ClassVar[bool] = False

    def store(self, params: PyTree) -> Any:
        """Return the anchor for `params`.

        Communication: none.
        """
        # The anchor sums many small displacements, which half precision would lose.
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)

    def like_stored(self, params: PyTree) -> Any:
        """Return an anchor like that of `store`, of which only shapes and dtypes matter."""
        return self.store(params)

    def average(self, y: PyTree) -> Any:
        """Return the mean of `y` over the replicas in the anchor's form; `y` without an exchange.

        Communication: one all-reduce of N bytes over the replica axis per buffer.
        """
        return y if self.exchange is None else replica_mean(y, self.exchange, role="slow")

    def average_parts(self, parts: PyTree) -> tuple[Any, PyTree]:
        """Return the mean of what replicas send in a codec, in the anchor's form, and what is lost.

        Communication: that of `mean_of_parts`.
        """
        assert self.exchange is not None
        return mean_of_parts(parts, self.exchange, role="slow")

    def restore(self, anchor: Any, params: PyTree) -> PyTree:
        """Return the anchor as float32 values in the shape of the parameters.

        Communication: none.
        """
        del params
        return anchor

    def pin(self, state: PyTree, params: PyTree) -> PyTree:
        """Return `state` with arrays of the anchor's form laid out like the anchor.

        Communication: none.
        """
        del params
        return state

    def join(self, anchor: Any, params: PyTree, old: StatePlacement) -> PyTree:
        """Return the anchor of all replicas as one tree like the parameters, on the host.

        Args:
          anchor: NumPy arrays with a leading replica axis, on placement `old`.
          params: shapes and dtypes of one copy of the parameters.
          old: the placement of `anchor`.
        """
        del params, old
        return jax.tree.map(replica_average, anchor)

    def split(self, tree: PyTree, params: PyTree, new: StatePlacement) -> Any:
        """Return an anchor on placement `new` from a whole tree; the inverse of `join`."""
        del params
        return jax.tree.map(lambda x: stacked(x, new), tree)

    def carried(
        self, anchor: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement, tree: PyTree
    ) -> PyTree:
        """Return `tree` on placement `new`, with parts of the anchor's form joined and split."""
        if self.exchange is None and old.replicas == new.replicas:
            return tree
        return replaced(
            anchor,
            tree,
            lambda x: self.split(self.join(x, params, old), params, new),
            lambda x: carry_leaf(x, old, new),
        )

    def types_on(self, params: PyTree, at: StatePlacement) -> Any:
        """Return the types of the anchor of all replicas on placement `at`, on the host."""
        return wide_types_on(params, at)


def merged(local: PyTree, anchor: PyTree, merge: float) -> PyTree:
    """Return `anchor + merge * (local - anchor)`: the anchor for 0, the local values for 1."""
    if merge == 0:
        return anchor
    if merge == 1:
        return jax.tree.map(lambda x, a: x.astype(a.dtype), local, anchor)
    return jax.tree.map(lambda x, a: a + merge * (x.astype(a.dtype) - a), local, anchor)


def shards_state(
    owner: str, shard_state: bool | None, exchange: Exchange, *, exact_average: bool = True
) -> bool:
    """Return whether slow state is sharded, for the argument `shard_state`.

    Raises:
      ValueError: a codec without an exchange.
    """
    codec = exchange.codec
    if codec is not None and not exact_average:
        raise ValueError(
            f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is nothing "
            f"for `codec`; got {codec!r}. Give it to the `base`."
        )
    # From shards the step would be made sparse a second time, on its way to the parameters.
    is_sparse = codec is not None and codec.is_sparse
    return (exact_average and not is_sparse) if shard_state is None else shard_state


_MOST_PARTS = 257  # bound on the devices of a replica, if their number is not known


@dataclass(frozen=True)
class ShardedAnchor(Anchor):
    """A sharded anchor: on each replica a tuple of `(rows, lanes)` float32 shards, one per buffer.

    On the host the shards of all replicas are arrays `(replicas, rows, lanes)`; the mesh they come
    from may no longer exist.
    """

    exchange: Exchange
    is_sharded = True

    def packing(self, params: PyTree) -> TreePacking:
        """Return the plan of the buffers, on devices and on the host, in at least float32.

        Leaves that are sharded over the same axes inside the replica share buffers. Without
        `param_specs` all leaves do.
        """
        return packing_of(params, self.exchange, at_least_float32)

    def layout(self, buffer: Buffer) -> ShardLayout:
        """Return the shape of a shard."""
        # Each replica holds 1/R. Its L devices all hold that shard, and each exchanges 1/L of its
        # rows, so rows must split evenly.
        shards, local = axis_size(self.exchange.axis_name), self.exchange.local_axis_name
        parts = 1 if local is None else axis_size(local)
        return shard_layout(buffer.num_elements, shards, num_parts=parts)

    def store(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Return this replica's shards of `params`.

        Communication: none.
        """

        # All replicas start from the same parameters, so each cuts its shards from its copy.
        def shard(buffer: Buffer, flat: jax.Array) -> jax.Array:
            return local_shard(flat, self.layout(buffer), self.exchange.axis_name)

        return tuple(self.packing(params).pack(params, shard))

    def like_stored(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Return zeros with the types of `store`, without packing anything."""
        by_group = self.packing(params).each(
            lambda group: [jnp.zeros(self.layout(b), b.dtype) for b in group.plan.buffers],
            kinds=(),
            out="flat",
        )
        return tuple(x for shards in by_group for x in shards)

    def average(self, y: PyTree) -> tuple[jax.Array, ...]:
        """Return this replica's shards of the mean of `y` over the replicas.

        Communication: one reduce-scatter of N bytes over the replica axis per buffer; see
          `mean_to_shards`.
        """
        axes, local = self.exchange.axis_name, self.exchange.local_axis_name

        # A reduce-scatter is the first half of an all-reduce, and `restore` is the second half. The
        # outer step runs on the shards in between, so both together cost one all-reduce.
        def mean(buffer: Buffer, flat: jax.Array) -> jax.Array:
            return mean_to_shards(flat, self.layout(buffer), axes, local)

        return tuple(self.packing(y).pack(y, mean, role="slow"))

    def restore(self, anchor: tuple[jax.Array, ...], params: PyTree) -> PyTree:
        """Return the anchor as float32 values in the shape of the parameters.

        Communication: one all-gather of N bytes over the replica axis per buffer; see
          `all_gather_shards`.
        """
        axes, local = self.exchange.axis_name, self.exchange.local_axis_name
        packing = self.packing(params)

        def whole(buffer: Buffer, shard: jax.Array) -> jax.Array:
            return all_gather_shards(shard, buffer.num_elements, axes, local)

        return packing.unpack(anchor, whole)

    def average_parts(self, parts: PyTree) -> tuple[tuple[jax.Array, ...], PyTree]:
        """Return shards of the mean of what replicas send in a codec, and what is lost.

        Communication: that of `mean_to_shards_in_codec`, for each buffer.
        """
        axes, local, codec = self._coded

        def mean(buffer: Buffer, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
            return mean_to_shards_in_codec(flat, self.layout(buffer), axes, codec, local)

        packing = self.packing(parts)
        pairs = packing.map(mean, packing.pack(parts, role="slow"))
        return tuple(mean for mean, _ in pairs), packing.unpack([lost for _, lost in pairs])

    def follow(self, view: PyTree, anchor: tuple[jax.Array, ...]) -> PyTree:
        """Return a tree like the parameters, equal on all replicas, moved to the anchor in a codec.

        What a codec does not send of the way stays between the two, and is part of the next way.

        Communication: that of `all_gather_shards` in a codec, for each buffer.
        """
        axes, local, codec = self._coded

        def whole(buffer: Buffer, shard: jax.Array) -> jax.Array:
            return all_gather_shards(shard, buffer.num_elements, axes, local, codec)

        way = jax.tree.map(subtracted, anchor, self.store(view))
        return jax.tree.map(added, view, self.packing(view).unpack(way, whole))

    @property
    def _coded(self) -> tuple[AxisName, AxisName | None, Codec]:
        assert self.exchange.codec is not None
        return self.exchange.axis_name, self.exchange.local_axis_name, self.exchange.codec

    def pin(self, state: PyTree, params: PyTree) -> PyTree:
        """Return `state` with shards laid out like the anchor; an optimizer's zeros have no layout.

        Communication: none.
        """
        packing = self.packing(params)
        # Shards of a group are split over the axes of its leaves. They are identified by shape, as
        # the optimizer's state holds them among other arrays.
        types = packing.by_group(packing.parts(1, self.layout))
        group_of = {
            like.shape[1:]: group
            for group, of_group in zip(packing.groups, types, strict=True)
            for like in of_group
        }

        def place(x: jax.Array) -> jax.Array:
            if x.shape not in group_of:
                return x
            return group_of[x.shape].on_blocks(lambda y: y, x, kinds=("flat",), out="flat")

        return jax.tree.map(place, state)

    def join(self, anchor: Any, params: PyTree, old: StatePlacement) -> PyTree:
        """Return the whole tree from its shards; see `Anchor.join`.

        Raises:
          ValueError: shards whose shapes do not fit parameters and placement.
        """
        packing, shapes = self._packing_on(old, params), [x.shape for x in anchor]
        # Only the padding at the end of a buffer depends on the devices of a replica.
        local = self.exchange.local_axis_name
        parts = [old.size(local)] if old.is_certain else range(1, _MOST_PARTS)
        expected = [[x.shape for x in _types(packing, old, n)] for n in parts]
        # Without this check shards of another run would silently give wrong values.
        if shapes not in expected:
            raise ValueError(f"shards of {shapes}, and not of {expected[0]}")
        whole = packing.join(anchor)
        # The result has the present form of the parameters, for which `split` will split it.
        return whole if old.form is None else old.form.convert(whole)

    def split(self, tree: PyTree, params: PyTree, new: StatePlacement) -> tuple[Any, ...]:
        """Return the stacked shards of a whole tree, padded with zeros; the inverse of `join`."""
        # Zeros at the end, as `local_shard` pads on devices.
        return self._packing_on(new, params).split(tree, self.types_on(params, new))

    def types_on(self, params: PyTree, at: StatePlacement) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See `Anchor.types_on`."""
        parts = at.size(self.exchange.local_axis_name)
        return _types(self._packing_on(at, params), at, parts)

    def _packing_on(self, at: StatePlacement, params: PyTree) -> TreePacking:
        """Return the plan of the shards on the mesh of `at`, which may no longer exist."""
        anchor = self
        # Shards of parameters in another form are joined in that form, and converted afterwards.
        if at.form is not None:
            params = at.form.params
        # Use the specs of that state, whatever the specs of this transform are.
        if at.specs is not None:
            specs = jax.tree.structure(params).unflatten(at.specs)
            anchor = ShardedAnchor(replace(self.exchange, param_specs=specs))
        with jax.sharding.use_abstract_mesh(at.mesh()):
            return anchor.packing(params)


def _types(
    packing: TreePacking, at: StatePlacement, parts: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the types of all replicas' shards, with rows that `parts` devices of each share."""
    return packing.parts(
        at.replicas, lambda b: shard_layout(b.num_elements, at.replicas, num_parts=parts)
    )
