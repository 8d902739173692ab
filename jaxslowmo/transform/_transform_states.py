"""Conversion of transforms' states to another number of replicas, on the host.

The functions here take and return NumPy arrays, so that a checkpoint of a mesh that no
longer exists can be read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..mesh import axis_names
from ..tree import at_least_float32


@dataclass(frozen=True)
class SavedForm:
    """The form that parameters had when a run was saved, and the conversion to the current form.

        then, now = saved_layout, pipe.layout  # of four stages, and of two
        SavedForm(then.stack_like(types), lambda tree: now.stack_like(then.unstack(tree)))

    Attributes:
      params: types of one copy of the parameters as they were saved, `ShapeDtypeStruct`s.
      convert: function that converts a tree like `params`, of NumPy arrays, to a tree like the
        current parameters. It moves elements and computes nothing: it also converts moments, anchor
        and momentum, in their dtypes, and leaves may have an additional first dimension of
        replicas.
    """

    params: PyTree
    # Written by the user, who knows both forms: a tree does not show how its elements correspond.
    convert: Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class StatePlacement:
    """The mesh of stacked state, and the layout of parameters on it.

    Attributes:
      replicas: number of replicas, the leading dimension of every leaf.
      axis_sizes: sizes of all axes of the mesh by name.
      automatic: axes over which leaves of the parameters are sharded inside a replica.
      is_certain: whether `axis_sizes` are known; arrays of a mesh without devices do not show them.
      specs: the layout over automatic axes of leaves that the state holds shards of: a
        `PartitionSpec` for each leaf of the parameters, in order. None: that of the transform.
      form: form of the parameters on this placement; None if it is the current form.
      division: how a saved state divides the parameters; see `Sync.division`. None: as a new one
        does.
    """

    replicas: int
    axis_sizes: Mapping[str, int]
    automatic: frozenset[str] = frozenset()
    is_certain: bool = True
    specs: tuple[P, ...] | None = None
    form: SavedForm | None = None
    division: Mapping[str, Any] | None = None

    def size(self, axis_name: AxisName | None) -> int:
        """Return the number of positions along one or several axes; missing axes count as 1."""
        names = () if axis_name is None else axis_names(axis_name)
        return math.prod(self.axis_sizes.get(name, 1) for name in names)

    def mesh(self) -> AbstractMesh:
        """Return the abstract mesh in which a transform is traced: replica axes are manual."""
        # Axes over which leaves are sharded are automatic; all others are mapped by `shard_map`.
        kinds = [AxisType.Auto if a in self.automatic else AxisType.Manual for a in self.axis_sizes]
        return AbstractMesh(tuple(self.axis_sizes.values()), tuple(self.axis_sizes), tuple(kinds))


class Carried(NamedTuple):
    """A state that was converted to another placement, and notes for the user."""

    state: PyTree
    notes: tuple[str, ...] = ()  # sentences that say what the conversion changed


def stacked(one: Any, new: StatePlacement) -> Any:
    """Return a view that stacks the same array for every replica."""
    # A copy would multiply the memory of a large model, and each replica's part is read only once.
    one = np.asarray(one)
    return np.broadcast_to(one, (new.replicas, *one.shape))


def carry_leaf(x: Any, old: StatePlacement, new: StatePlacement) -> Any:
    """Return a leaf on `new`: the replicas' mean for floats, else replica 0's values."""
    return x if old.replicas == new.replicas else stacked(replica_average(x), new)


def replica_average(x: np.ndarray) -> np.ndarray:
    """Return the mean over replicas of a floating leaf, or replica 0's values of other leaves."""
    # Counters are equal on all replicas; keys and flags have no mean. Equal floats stay exact.
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.all(x == x[:1]):
        return x[0]
    # Half precision would lose digits in a sum of many replicas.
    return np.mean(x.astype(np.float64), axis=0).astype(x.dtype)


def wide_types_on(params: PyTree, at: StatePlacement) -> PyTree:
    """Return the types of all replicas of a tree like the parameters, in at least float32."""

    def of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((at.replicas, *x.shape), at_least_float32(x.dtype))

    return jax.tree.map(of, params)
