"""Where slow state lives: each replica its own, whole on each, or sharded over the replicas.

The outer step is the same for all three. An anchor says how it is stored, how the average of the
replicas reaches that form, and how parameters are restored from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from ..._support.types import PyTree
from ...transform import (
    Exchange,
    StatePlacement,
    carry_leaf,
    replica_average,
    replica_mean,
    stacked,
)
from ...tree import at_least_float32


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
