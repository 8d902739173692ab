"""How model state, such as BatchNorm statistics, is kept together."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import AxisName, PyTree
from ..algorithms import replica_mean
from ..mesh import axis_names, axis_size, vary_over, varying_axes

ModelStateMode = Literal["sync_mean", "broadcast", "local"]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def vary_statistics(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark floating leaves as varying over `axes`; counters and keys stay equal there."""
    return jax.tree.map(lambda x: vary_over(x, axes) if _floating(x) else x, tree)


def mean_over(tree: PyTree, axes: AxisName) -> PyTree:
    """Mean of the floating leaves over `axes`; of integer leaves that differ, the largest.

    Communication: one all-reduce over `axes` per floating dtype; none for a tree without.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floating = [i for i, x in enumerate(leaves) if _floating(x)]
    means = replica_mean([leaves[i] for i in floating], axes, None, None)
    for i, mean in zip(floating, means, strict=True):
        leaves[i] = mean
    for i, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.integer) and varying_axes(x) & set(axis_names(axes)):
            leaves[i] = lax.pmax(x, axes)
    return treedef.unflatten(leaves)


def from_first_replica(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Every leaf as replica 0 has it.

    Communication: one all-reduce of each leaf over `axis_name` (all others add zeros).
    """
    if axis_size(axis_name) == 1:
        return tree
    first = lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda x: lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axis_name), tree)
