"""Where slow state lives: each replica its own, whole on each, or sharded over the replicas.

The outer step is the same for all three. An anchor says how it is stored, how the average of the
replicas reaches that form, and how parameters are restored from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import AxisName, PyTree
from ...collectives import ShardLayout, all_gather_shards, mean_to_shards, own_shard, shard_layout
from ...mesh import AnyMesh, axis_size, kept_with, map_replicas, model_axes
from ...transform import (
    BlockGroup,
    Exchange,
    Flats,
    ParameterTransform,
    StatePlacement,
    TreePacking,
    carry_leaf,
    on_blocks,
    packing_of,
    replica_average,
    replica_mean,
    stacked,
)
from ...tree import Buffer, BufferPlan, at_least_float32


@dataclass(frozen=True)
class Anchor:
    """Every replica keeps a whole anchor, a float32 tree like the parameters.

    Attributes:
      exchange: over which replicas average, so that their anchors are equal. None: each has its
        own, of which `join` gives the mean.
      is_sharded: whether `store` needs the replica axis, to know which shard is this replica's.
    """

    exchange: Exchange | None
    is_sharded: ClassVar[bool] = False

    def store(self, params: PyTree) -> Any:
        """The anchor of given parameters.

        Communication: none.
        """
        # The anchor sums many small displacements: half precision would lose them.
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)

    def like_stored(self, params: PyTree) -> Any:
        """Of that only shapes and dtypes matter."""
        return self.store(params)

    def average(self, y: PyTree) -> Any:
        """Mean of `y` over the replicas, in the anchor's form; `y` where each has its own.

        Communication: one all-reduce of N bytes over the replica axis per buffer.
        """
        return y if self.exchange is None else replica_mean(y, self.exchange, role="slow")

    def restore(self, anchor: Any, params: PyTree) -> PyTree:
        """Float32 values in the shape of the parameters.

        Communication: none.
        """
        del params
        return anchor

    def pin(self, state: PyTree, params: PyTree) -> PyTree:
        """Lays arrays of the anchor's form in `state` out as the anchor is.

        Communication: none.
        """
        del params
        return state

    def join(self, anchor: Any, params: PyTree, old: StatePlacement) -> PyTree:
        """The anchor of all replicas as one tree like the parameters, on the host.

        Args:
          anchor: NumPy arrays with a leading replica axis, on placement `old`.
          params: shapes and dtypes of one copy of the parameters.
          old: where it comes from.
        """
        del params, old
        return jax.tree.map(replica_average, anchor)

    def split(self, tree: PyTree, params: PyTree, new: StatePlacement) -> Any:
        """The inverse of `join`, for placement `new`."""
        del params
        return jax.tree.map(lambda x: stacked(x, new), tree)

    def moved(
        self, anchor: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement, tree: PyTree
    ) -> PyTree:
        """`tree` with what has the form of the anchor joined and split again."""
        if self.exchange is None and old.replicas == new.replicas:
            return tree
        is_like_anchor = of_form(anchor)

        def move(x: PyTree) -> PyTree:
            if is_like_anchor(x):
                return self.split(self.join(x, params, old), params, new)
            return carry_leaf(x, old, new)

        return jax.tree.map(move, tree, is_leaf=is_like_anchor)

    def like_on(self, anchor: PyTree, params: PyTree, at: StatePlacement, tree: PyTree) -> PyTree:
        """Types of `tree` on placement `at`, of those of an anchor and what has its form."""
        # A whole anchor has the leaves of the parameters on every mesh.
        del anchor, params, at
        return tree


def of_form(anchor: PyTree) -> Callable[[PyTree], bool]:
    """Whether a tree has the form of the anchor."""
    # An optimizer keeps trees of the anchor's form (momentum), and counters: both are found by
    # their form, whatever the optimizer is.
    form = jax.tree.structure(anchor), [np.shape(x) for x in jax.tree.leaves(anchor)]

    def is_like_anchor(x: PyTree) -> bool:
        leaves, structure = jax.tree.flatten(x)
        return (structure, [np.shape(leaf) for leaf in leaves]) == form

    return is_like_anchor


def shards_state(
    owner: str, shard_state: bool | None, exchange: Exchange, *, exact_average: bool = True
) -> bool:
    """Whether slow state is sharded; `shard_state` as users give it.

    Raises:
      ValueError: a codec where the anchor is sharded, or where there is no exchange.
    """
    codec = exchange.codec
    if codec is not None and not exact_average:
        raise ValueError(
            f"{owner}: `exact_average=False` exchanges nothing in slow steps, so there is nothing "
            f"for `codec`; got {codec!r}. Give it to the `base`."
        )
    if codec is not None and shard_state:
        raise ValueError(
            f"{owner}: with a `codec` a replica sends what it has moved from the anchor, of which "
            f"it must hold all; got {codec!r} and shard_state=True. Leave `shard_state` out or set "
            "it to False."
        )
    return (exact_average and codec is None) if shard_state is None else shard_state


_MOST_PARTS = 257  # devices of a replica, where their number is not known


@dataclass(frozen=True)
class ShardedAnchor(Anchor):
    """Each replica keeps 1/R: a tuple with its `(rows, lanes)` float32 shard of every buffer.

    On the host the shards of all replicas are arrays `(replicas, rows, lanes)`, of a mesh that may
    be gone.
    """

    exchange: Exchange
    is_sharded = True

    def packing(self, params: PyTree) -> TreePacking:
        """The one plan of the shards, on devices and on the host: leaves in at least float32.

        Leaves that are sharded over the same axes inside the replica share buffers; without
        `param_specs` all do.
        """
        return packing_of(params, self.exchange, at_least_float32)

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

        return _joined(self.packing(params).pack(params, shard))

    def like_stored(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Zeros like that, without packing anything."""

        def zeros(buffer: Buffer) -> jax.Array:
            layout = self.layout(buffer)
            return jnp.zeros((layout.rows, layout.lanes), buffer.dtype)

        return _joined(
            self.packing(params).each(
                lambda group: [zeros(b) for b in group.plan.buffers], kinds=(), out="flat"
            )
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

        return _joined(self.packing(y).pack(y, mean, role="slow"))

    def restore(self, anchor: tuple[jax.Array, ...], params: PyTree) -> PyTree:
        """Float32 values in the shape of the parameters.

        Communication: one all-gather of N bytes over the replica axis per buffer; see
          `all_gather_shards`.
        """
        axes, local = self.exchange.axis_name, self.exchange.local_axis_name
        packing = self.packing(params)

        def whole(buffer: Buffer, shard: jax.Array) -> jax.Array:
            return all_gather_shards(shard, buffer.num_elements, axes, local)

        return packing.unpack(packing.by_group(anchor), whole)

    def pin(self, state: PyTree, params: PyTree) -> PyTree:
        """Zeros that an outer optimizer makes have no layout of their own yet.

        Communication: none.
        """
        packing = self.packing(params)
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
        """The whole tree that the shards are of; see `Anchor.join`.

        Raises:
          ValueError: shards of other shapes than parameters and placement ask for.
        """
        packing = self._packing_on(old, params)
        leaves: list[Any] = [None] * packing.treedef.num_leaves
        # Only the padding at the end of a buffer depends on the devices of a replica.
        local = self.exchange.local_axis_name
        parts = [old.size(local)] if old.is_certain else range(1, _MOST_PARTS)
        for first, group, plan in packing.numbered():
            held, count = anchor[first : first + len(plan.buffers)], group.num_blocks
            wanted = [
                [(old.replicas, count * s.rows, s.lanes) for s in _layouts(plan, old, n)]
                for n in parts
            ]
            # Shards of another run would be cut into nonsense without a word.
            if [x.shape for x in held] not in wanted:
                raise ValueError(f"shards of {[x.shape for x in held]}, and not of {wanted[0]}")
            dtypes = {i: buffer.dtype for buffer in plan.buffers for i in buffer.leaves}
            for place, (i, shape) in enumerate(zip(group.indices, group.shapes, strict=True)):
                leaves[i] = np.empty(shape, dtypes[place])
            for device, block in enumerate(group.blocks()):
                # Rows lie by device of the group, then by replica; a buffer runs over the replicas.
                flats = [x.reshape(old.replicas, count, -1)[:, device].reshape(-1) for x in held]
                for leaf, where, part in zip(group.indices, block, plan.unpack(flats), strict=True):
                    leaves[leaf][where] = part
        if more := len(anchor) - len(packing.buffers()):
            raise ValueError(f"{more} shards more than the parameters need")
        whole = packing.treedef.unflatten(leaves)
        # From here on it is like the parameters of now, for whom it will be split.
        return whole if old.form is None else old.form.convert(whole)

    def split(self, tree: PyTree, params: PyTree, new: StatePlacement) -> tuple[Any, ...]:
        """The inverse of `join`: stacked shards of a whole tree, zeros where they are padded."""
        packing, parts = self._packing_on(new, params), new.size(self.exchange.local_axis_name)
        leaves = jax.tree.leaves(tree)
        found: list[np.ndarray] = []
        for group, plan in zip(packing.groups, packing.plans, strict=True):
            for layout, buffer in zip(_layouts(plan, new, parts), plan.buffers, strict=True):
                shard = np.zeros((new.replicas, group.num_blocks, layout.size), buffer.dtype)
                for device, block in enumerate(group.blocks()):
                    values = [leaves[j][at] for j, at in zip(group.indices, block, strict=True)]
                    # Zeros at the end, where `own_shard` pads on devices.
                    flat = np.zeros(new.replicas * layout.size, buffer.dtype)
                    own = [values[p.label].reshape(-1)[p.start : p.stop] for p in buffer.pieces]
                    flat[: buffer.num_elements] = np.concatenate(own)
                    shard[:, device] = flat.reshape(new.replicas, -1)
                found.append(shard.reshape(new.replicas, -1, layout.lanes))
        return tuple(found)

    def like_on(self, anchor: PyTree, params: PyTree, at: StatePlacement, tree: PyTree) -> PyTree:
        """See `Anchor.like_on`."""
        packing, parts = self._packing_on(at, params), at.size(self.exchange.local_axis_name)
        # Each device of a group has shards of its own, which lie one behind the other.
        shards = tuple(
            jax.ShapeDtypeStruct((at.replicas, group.num_blocks * s.rows, s.lanes), buffer.dtype)
            for group, plan in zip(packing.groups, packing.plans, strict=True)
            for s, buffer in zip(_layouts(plan, at, parts), plan.buffers, strict=True)
        )
        # What the outer optimizer keeps for shards (momentum) is cut as they are.
        is_shards = of_form(anchor)
        return jax.tree.map(lambda x: shards if is_shards(x) else x, tree, is_leaf=is_shards)

    def _packing_on(self, at: StatePlacement, params: PyTree) -> TreePacking:
        """The plan of the shards as it is made on the devices of a mesh, which may be gone."""
        anchor = self
        # Shards of parameters of another form: what is joined of them is converted.
        if at.form is not None:
            params = at.form.params
        # As it was cut there, whatever this transform would cut by.
        if at.specs is not None:
            specs = jax.tree.structure(params).unflatten(at.specs)
            anchor = ShardedAnchor(replace(self.exchange, param_specs=specs))
        with jax.sharding.use_abstract_mesh(at.mesh()):
            return anchor.packing(params)


def _joined(by_group: Flats) -> tuple[jax.Array, ...]:
    return tuple(x for own in by_group for x in own)


def _layouts(plan: BufferPlan, at: StatePlacement, parts: int) -> list[ShardLayout]:
    return [shard_layout(b.num_elements, at.replicas, num_parts=parts) for b in plan.buffers]


def read_anchor(
    sync: ParameterTransform,
    state: PyTree,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """The anchor of `slowmo` or `diloco` as a float32 tree like the parameters.

    Args:
      sync: the transform that made the state.
      state: its stacked state; in a `TrainState`, `state.opt_state[-1]`.
      stacked_params: the parameters, leaves `(replicas, *s)`; only shapes and dtypes matter.
      mesh: the mesh they live on.
      axis_name: the replica axis.

    Returns:
      Tree of `(replicas, *s)`: equal on all replicas, unless `exact_average=False` lets each keep
      its own.

    Raises:
      ValueError: a transform without an anchor.

    Communication: where the anchor is sharded one all-gather of it over `axis_name`, else none.
    """
    if sync.anchor is None:
        raise ValueError("`sync` must be made by js.slowmo or js.diloco: others have no anchor.")
    # A program, since the shards of other processes are nowhere on this host.
    automatic = model_axes(stacked_params, mesh, axis_name)

    def made(anchor: Callable[[PyTree, PyTree], PyTree]) -> Callable[[PyTree, PyTree], PyTree]:
        return jax.jit(
            map_replicas(
                anchor,
                mesh=mesh,
                axis_name=axis_name,
                in_roles=("stacked", "stacked"),
                automatic=automatic,
            )
        )

    return kept_with(sync.anchor, (mesh, axis_name, automatic), made)(state, stacked_params)
