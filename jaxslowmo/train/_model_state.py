"""How model state, such as BatchNorm statistics, is kept together."""

from typing import Literal

import jax
import jax.numpy as jnp

from .._typing import AxisName, PyTree
from ..algorithms import replica_mean
from ..mesh import from_first, vary_over

ModelStateMode = Literal["sync_mean", "broadcast", "local"]


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def vary_statistics(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark floating leaves as varying over `axes`; counters and keys stay equal there."""
    return jax.tree.map(lambda x: vary_over(x, axes) if _floating(x) else x, tree)


def mean_over(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Mean of the floating leaves over `axis_name`; other leaves stay as they are.

    Communication: one all-reduce over `axis_name` per floating dtype; none for a tree without.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floating = [i for i, x in enumerate(leaves) if _floating(x)]
    means = replica_mean([leaves[i] for i in floating], axis_name)
    for i, mean in zip(floating, means, strict=True):
        leaves[i] = mean
    return treedef.unflatten(leaves)


def agree_inside(tree: PyTree, inner_axes: tuple[str, ...]) -> PyTree:
    """One model state for all devices of a replica: floating leaves averaged, others the first's.

    Communication: one all-reduce over `inner_axes` per floating dtype, and one per other leaf.
    """
    if not inner_axes:
        return tree
    return jax.tree.map(
        lambda x: x if _floating(x) else from_first(x, inner_axes), mean_over(tree, inner_axes)
    )
