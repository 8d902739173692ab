"""The mesh of a saved state, and conversion of leaves to another number of replicas, on the host.

The functions here take and return NumPy arrays, so that a checkpoint of a mesh that no
longer exists can be read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree, axis_names


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
      form: form of the parameters on this placement; None if it is the current form.
      specs: for each leaf of the parameters its layout over `automatic`; () for whole leaves.
    """

    replicas: int
    axis_sizes: Mapping[str, int]
    automatic: frozenset[str] = frozenset()
    is_certain: bool = True
    form: SavedForm | None = None
    specs: tuple[P, ...] = ()

    def parts(self, leaf: int, dimension: int) -> int:
        """Return the number of devices that split a dimension of a leaf of the parameters."""
        entries = self.specs[leaf] if leaf < len(self.specs) else ()
        names = axis_names(entries[dimension] or ()) if dimension < len(entries) else ()
        return math.prod(self.axis_sizes[name] for name in names)


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
