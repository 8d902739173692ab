"""How model state, such as BatchNorm statistics, is kept together."""

from typing import Literal

import jax
import jax.numpy as jnp

from ...._support.types import AxisName, PyTree
from ....mesh import from_first, match_varying, vary_over
from ....transform import Exchange, replica_mean

ModelStateMode = Literal["sync_mean", "broadcast", "local"]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def vary_statistics(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark floating leaves as varying over `axes`; counters and keys stay equal there."""
    return jax.tree.map(lambda x: vary_over(x, axes) if _floating(x) else x, tree)


def from_first_replica(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Replica 0's values, but for PRNG keys: with equal ones all would draw alike.

    Communication: one all-reduce of each other leaf over `axis_name`.
    """

    def first(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else match_varying(from_first(x, axis_name), x)

    return jax.tree.map(first, tree)


def statistics_before_if(skipped: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new`, with the floating leaves of `old` where an update was skipped, () bool.

    An average of something infinite would stay so, and go to all replicas. Counters and keys go on.

    Communication: none.
    """

    def one(n: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.where(skipped, match_varying(o, n), n) if _floating(n) else n

    return jax.tree.map(one, new, old)


class Statistics:
    """The leaves of model state that are averaged with the parameters: floating ones, or none.

    Attributes:
      leaves: those, in flattening order.
    """

    def __init__(self, model_state: PyTree, *, averaged: bool = True) -> None:
        self._all, self._treedef = jax.tree.flatten(model_state)
        self._positions = [i for i, x in enumerate(self._all) if averaged and _floating(x)]
        self.leaves: list[jax.Array] = [self._all[i] for i in self._positions]

    def replaced(self, leaves: list[jax.Array]) -> PyTree:
        """The model state with other values for these leaves."""
        new = list(self._all)
        for i, leaf in zip(self._positions, leaves, strict=True):
            new[i] = leaf
        return self._treedef.unflatten(new)

    def averaged_over(self, axis_name: AxisName, weight: jax.Array | None = None) -> PyTree:
        """The model state with their means over `axis_name`; as it is if all weigh 0.

        Communication: one all-reduce over `axis_name` per dtype, and with a weight, before, one of
          8 bytes; none without such leaves.
        """
        if not self.leaves:
            return self.replaced([])
        return self.replaced(replica_mean(self.leaves, Exchange(axis_name), weight))


def mean_over(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Mean of the floating leaves over `axis_name`; other leaves stay as they are.

    Communication: one all-reduce over `axis_name` per floating dtype; none for a tree without.
    """
    return Statistics(tree).averaged_over(axis_name)


def agree_inside(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """One model state for all devices of a replica: floating leaves averaged, others the first's.

    Communication: one all-reduce over `inner_axes` per floating dtype, and one per other leaf.
    """
    if not inner_axes:
        return tree
    return jax.tree.map(
        lambda x: x if _floating(x) else from_first(x, inner_axes), mean_over(tree, inner_axes)
    )
