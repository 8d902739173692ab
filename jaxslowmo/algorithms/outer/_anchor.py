"""Where slow state lives: each replica its own, whole on each, or sharded over the replicas.

The outer step is the same for all three. An anchor says how it is stored, how the average of the
replicas reaches that form, and how parameters are restored from it.
"""

from typing import Any

import jax

from ..._typing import PyTree
from ...transform import Exchange, Placement, replica_average, replica_mean, stacked
from ...tree import at_least_float32


class OwnAnchor:
    """Each replica keeps its own anchor, a float32 tree like the parameters, and averages nothing.

    Attributes:
      is_sharded: whether `store` needs the replica axis, to know which shard is this replica's.
      is_own: whether replicas have anchors of their own, of which `join` gives the mean.
    """

    is_sharded = False
    is_own = True

    def store(self, params: PyTree) -> Any:
        """The anchor of given parameters.

        Communication: none.
        """
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)

    def like_stored(self, params: PyTree) -> Any:
        """Zeros of the shapes and dtypes of that, from types alone."""
        return self.store(params)

    def average(self, y: PyTree) -> Any:
        """Mean of `y` over the replicas, in the anchor's form.

        Communication: none.
        """
        return y

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

    def join(self, anchor: Any, params: PyTree, old: Placement) -> PyTree:
        """The anchor of all replicas as one tree like the parameters, on the host.

        Args:
          anchor: NumPy arrays with a leading replica axis, on placement `old`.
          params: shapes and dtypes of one copy of the parameters.
          old: where it comes from.
        """
        del params, old
        return jax.tree.map(replica_average, anchor)

    def split(self, tree: PyTree, params: PyTree, new: Placement) -> Any:
        """The inverse of `join`, for placement `new`."""
        del params
        return jax.tree.map(lambda x: stacked(x, new), tree)


class WholeAnchor(OwnAnchor):
    """Every replica keeps the whole anchor, equal on all."""

    is_own = False

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def average(self, y: PyTree) -> PyTree:
        """Mean of `y` over the replicas.

        Communication: one all-reduce of N bytes over the replica axis per buffer.
        """
        return replica_mean(y, self.exchange, role="slow")
