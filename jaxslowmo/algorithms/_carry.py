"""Stacked state from one number of replicas, or one layout inside them, to another; on the host.

The functions here take and return NumPy arrays, so that a checkpoint of a mesh that no longer
exists can be read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, PyTree
from ..collectives import ShardLayout, shard_layout
from ..mesh import axis_names
from ..tree import BufferPlan, at_least_float32, plan_buffers
from ._blocks import BlockGroup, block_groups, bucket_limits


@dataclass(frozen=True)
class Placement:
    """The mesh that stacked state belongs to.

    Attributes:
      replicas: their number, the leading dimension of every leaf.
      axis_sizes: of all axes of the mesh.
      automatic: axes over which leaves of the parameters are sharded inside a replica.
      is_certain: whether `axis_sizes` are known; without devices they leave no trace in arrays.
    """

    replicas: int
    axis_sizes: Mapping[str, int]
    automatic: frozenset[str] = frozenset()
    is_certain: bool = True

    def size(self, axis_name: AxisName | None) -> int:
        """Number of positions along an axis or several; 1 for what the mesh does not have."""
        names = () if axis_name is None else axis_names(axis_name)
        return math.prod(self.axis_sizes.get(name, 1) for name in names)


class Carried(NamedTuple):
    """State on another placement, and what became of it."""

    state: PyTree
    notes: tuple[str, ...] = ()  # sentences


Carry = Callable[[PyTree, PyTree, Placement, Placement], Carried]
"""`carry(state, params, old, new)`: see `ParameterTransform.carry`."""

Shares = Callable[[PyTree], list[tuple[Any, PyTree | None]]]
"""`shares(state)`: see `ParameterTransform.shares`."""


def stacked(one: Any, new: Placement) -> Any:
    """The same array for every replica, as a view."""
    one = np.asarray(one)
    return np.broadcast_to(one, (new.replicas, *one.shape))


def carry_leaf(x: Any, old: Placement, new: Placement) -> Any:
    """A leaf of which nothing else is known: the mean of floats, replica 0's of the others."""
    return x if old.replicas == new.replicas else stacked(replica_average(x), new)


def replica_average(x: np.ndarray) -> np.ndarray:
    """The mean of a floating leaf over its replicas, exact where they agree; else replica 0's."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.all(x == x[:1]):
        return x[0]
    return np.mean(x.astype(np.float64), axis=0).astype(x.dtype)


def carry_plainly(state: PyTree, params: PyTree, old: Placement, new: Placement) -> Carried:
    """A state of counters, and of values that may be averaged."""
    del params
    return Carried(jax.tree.map(lambda x: carry_leaf(x, old, new), state))


@dataclass(frozen=True)
class AnchorShards:
    """The shards of `sharded_anchor` as arrays `(replicas, rows, lanes)` on the host.

    Attributes:
      param_specs: as the transform has them.
      bucket_bytes: likewise.
      local_axis_name: likewise.
    """

    param_specs: PyTree | None
    bucket_bytes: int | None
    local_axis_name: AxisName | None

    def join(self, shards: tuple[np.ndarray, ...], params: PyTree, old: Placement) -> PyTree:
        """The whole tree that the shards are of.

        Args:
          shards: stacked, in the order of the buffers.
          params: shapes and dtypes of one copy of the parameters.
          old: where the shards come from.

        Returns:
          A tree like `params`, in at least float32.

        Raises:
          ValueError: shards of other shapes than parameters and placement ask for.
        """
        structs, treedef = jax.tree.flatten(params)
        leaves = [np.empty(p.shape, at_least_float32(p.dtype)) for p in structs]
        rest = list(shards)
        for group in self._groups(params, old):
            plan = self._plan(group, structs, old)
            held, rest = rest[: len(plan.buffers)], rest[len(plan.buffers) :]
            count = _num_blocks(group, old)
            # Only the padding at the end of a buffer depends on the devices of a replica.
            parts = [old.size(self.local_axis_name)] if old.is_certain else range(1, _MOST_PARTS)
            wanted = [
                [(old.replicas, count * s.rows, s.lanes) for s in _layouts(plan, old, n)]
                for n in parts
            ]
            if [x.shape for x in held] not in wanted:
                raise ValueError(f"shards of {[x.shape for x in held]}, and not of {wanted[0]}")
            for i, block in enumerate(_block_slices(group, structs, old)):
                flats = [x.reshape(old.replicas, count, -1)[:, i].reshape(-1) for x in held]
                for leaf, where, part in zip(group.indices, block, plan.unpack(flats), strict=True):
                    leaves[leaf][where] = part
        if rest:
            raise ValueError(f"{len(rest)} shards more than the parameters need")
        return treedef.unflatten(leaves)

    def split(self, tree: PyTree, params: PyTree, new: Placement) -> tuple[np.ndarray, ...]:
        """The inverse of `join`: stacked shards of a whole tree, zeros where they are padded."""
        leaves, structs = jax.tree.leaves(tree), jax.tree.leaves(params)
        found: list[np.ndarray] = []
        for group in self._groups(params, new):
            plan = self._plan(group, structs, new)
            layouts = _layouts(plan, new, new.size(self.local_axis_name))
            count = _num_blocks(group, new)
            shards = [
                np.zeros((new.replicas, count, s.size), buffer.dtype)
                for s, buffer in zip(layouts, plan.buffers, strict=True)
            ]
            for i, block in enumerate(_block_slices(group, structs, new)):
                parts = [leaves[j][at] for j, at in zip(group.indices, block, strict=True)]
                for shard, buffer in zip(shards, plan.buffers, strict=True):
                    flat = np.zeros(new.replicas * shard.shape[-1], buffer.dtype)
                    own = [parts[p.label].reshape(-1)[p.start : p.stop] for p in buffer.pieces]
                    flat[: buffer.num_elements] = np.concatenate(own)
                    shard[:, i] = flat.reshape(new.replicas, -1)
            found += [
                x.reshape(new.replicas, count * s.rows, s.lanes)
                for x, s in zip(shards, layouts, strict=True)
            ]
        return tuple(found)

    def _groups(self, params: PyTree, at: Placement) -> list[BlockGroup]:
        if self.param_specs is None:
            return block_groups(params, None)
        kinds = [AxisType.Auto if a in at.automatic else AxisType.Manual for a in at.axis_sizes]
        mesh = AbstractMesh(tuple(at.axis_sizes.values()), tuple(at.axis_sizes), tuple(kinds))
        with jax.sharding.use_abstract_mesh(mesh):
            return block_groups(params, self.param_specs)

    def _plan(self, group: BlockGroup, structs: list[Any], at: Placement) -> BufferPlan:
        first = next(_block_slices(group, structs, at))
        blocks = [
            jax.ShapeDtypeStruct(tuple(s.stop - s.start for s in where), structs[leaf].dtype)
            for leaf, where in zip(group.indices, first, strict=True)
        ]
        limits = bucket_limits(self.bucket_bytes)
        return plan_buffers(blocks, limits=limits, dtype_of=at_least_float32)


_MOST_PARTS = 257  # devices of a replica, where their number is not known


def _layouts(plan: BufferPlan, at: Placement, parts: int) -> list[ShardLayout]:
    return [shard_layout(b.num_elements, at.replicas, num_parts=parts) for b in plan.buffers]


def _num_blocks(group: BlockGroup, at: Placement) -> int:
    return math.prod(at.axis_sizes[name] for name in group.axes)


def _block_slices(
    group: BlockGroup, structs: list[Any], at: Placement
) -> Iterator[list[tuple[slice, ...]]]:
    """For each device along the group's axes, in order: which part it holds of each leaf."""
    for index in np.ndindex(*(at.axis_sizes[name] for name in group.axes)):
        where = dict(zip(group.axes, index, strict=True))
        yield [
            _block_of(structs[leaf].shape, spec, where, at)
            for leaf, spec in zip(group.indices, group.specs, strict=True)
        ]


def _block_of(
    shape: tuple[int, ...], spec: P, where: Mapping[str, int], at: Placement
) -> tuple[slice, ...]:
    slices = []
    for dimension, size in enumerate(shape):
        entry = spec[dimension] if dimension < len(spec) else None
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        index, count = 0, 1
        for name in names:
            if name in where:
                index, count = index * at.axis_sizes[name] + where[name], count * at.size(name)
        step = size // count
        slices.append(slice(index * step, (index + 1) * step))
    return tuple(slices)
