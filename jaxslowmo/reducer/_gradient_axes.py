"""Which axes gradients vary over, where values are typed with that."""

import jax
import optax

from .._typing import PyTree
from ..mesh import axes_of, collective_axes, vary_over, varying_axes


def common_axes(tree: PyTree) -> frozenset[str]:
    """Axes that all leaves vary over."""
    each = [varying_axes(leaf) for leaf in jax.tree.leaves(tree)]
    return frozenset.intersection(*each) if each else frozenset()


def reduced_axes(
    transform: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> frozenset[str]:
    """Axes over which parameters are equal, and gradients, which `transform` reduces there, not.

    Under `shard_map(check_vma=True)`, where a sum of gradients is typed as they are. Everywhere
    else there are none.

    Args:
      transform: takes the gradients.
      state: of it.
      params: whose gradients they are.
    """
    varied = vary_over(params, jax.sharding.get_abstract_mesh().manual_axes)
    unlike = axes_of(varied) - axes_of(params)
    if not unlike:
        return unlike
    try:
        traced = jax.make_jaxpr(transform.update)(varied, state, params)
    except TypeError:  # it needs what comes with an update only, such as `value`
        return frozenset()
    return unlike & collective_axes(traced.jaxpr)
