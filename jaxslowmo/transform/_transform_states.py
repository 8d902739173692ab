"""How states of transforms move to other replicas, on the host.

The functions here take and return NumPy arrays, so that a checkpoint of a mesh that no
longer exists can be read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..mesh import axis_names


@dataclass(frozen=True)
class SavedForm:
    """The form that parameters had when a run was saved.

        then, now = saved_layout, pipe.layout  # of four stages, and of two
        SavedForm(then.stack_like(types), lambda tree: now.stack_like(then.unstack(tree)))

    Attributes:
      params: types of one copy of the parameters as they were saved, `ShapeDtypeStruct`s.
      convert: of a tree like these, of NumPy arrays, the tree like the parameters of now. It moves
        elements and computes nothing: moments, anchor and momentum are converted by it too, in
        their own dtypes, and leaves may have a first dimension more, of replicas.
    """

    params: PyTree
    # By whoever knows both forms: nothing in a tree tells which element is whose.
    convert: Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class StatePlacement:
    """The mesh that stacked state belongs to.

    Attributes:
      replicas: their number, the leading dimension of every leaf.
      axis_sizes: of all axes of the mesh.
      automatic: axes over which leaves of the parameters are sharded inside a replica.
      is_certain: whether `axis_sizes` are known; without devices they leave no trace in arrays.
      specs: how leaves are sharded over the automatic axes where state is kept in shards of them:
        a `PartitionSpec` for each leaf of the parameters, in order. None: as the transform says.
      form: of the parameters there, where it was another one than now.
    """

    replicas: int
    axis_sizes: Mapping[str, int]
    automatic: frozenset[str] = frozenset()
    is_certain: bool = True
    specs: tuple[P, ...] | None = None
    form: SavedForm | None = None

    def size(self, axis_name: AxisName | None) -> int:
        """Number of positions along an axis or several; 1 for what the mesh does not have."""
        names = () if axis_name is None else axis_names(axis_name)
        return math.prod(self.axis_sizes.get(name, 1) for name in names)

    def mesh(self) -> AbstractMesh:
        """The mesh as a transform sees it while it is traced: replica axes are manual."""
        # Axes over which leaves are sharded are the compiler's; all others are mapped by hand.
        kinds = [AxisType.Auto if a in self.automatic else AxisType.Manual for a in self.axis_sizes]
        return AbstractMesh(tuple(self.axis_sizes.values()), tuple(self.axis_sizes), tuple(kinds))


class Carried(NamedTuple):
    """State on another placement, and what became of it."""

    state: PyTree
    notes: tuple[str, ...] = ()  # sentences


Carry = Callable[[PyTree, PyTree, StatePlacement, StatePlacement], Carried]
"""`carry(state, params, old, new)`: see `CheckpointSpec.carry`."""

Shares = Callable[[PyTree], Sequence[tuple[Any, PyTree | None]] | None]
"""`shares(state)`: see `CheckpointSpec.shares`."""


LikeOn = Callable[[PyTree, PyTree, StatePlacement], PyTree]
"""`like_on(state, params, at)`: see `CheckpointSpec.like_on`."""


def stacked(one: Any, new: StatePlacement) -> Any:
    """The same array for every replica, as a view."""
    # Nothing is copied: a model may be large, and each replica's part is read once.
    one = np.asarray(one)
    return np.broadcast_to(one, (new.replicas, *one.shape))


def carry_leaf(x: Any, old: StatePlacement, new: StatePlacement) -> Any:
    """A leaf of which nothing else is known: the mean of floats, replica 0's of the others."""
    return x if old.replicas == new.replicas else stacked(replica_average(x), new)


def replica_average(x: np.ndarray) -> np.ndarray:
    """The mean of a floating leaf over its replicas, exact where they agree; else replica 0's."""
    # Counters are equal on all replicas; keys and flags have no mean.
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.all(x == x[:1]):
        return x[0]
    # In float64: the sum of many replicas in half precision would lose digits.
    return np.mean(x.astype(np.float64), axis=0).astype(x.dtype)


def carry_plainly(
    state: PyTree, params: PyTree, old: StatePlacement, new: StatePlacement
) -> Carried:
    """A state of counters, and of values that may be averaged."""
    del params
    return Carried(jax.tree.map(lambda x: carry_leaf(x, old, new), state))
