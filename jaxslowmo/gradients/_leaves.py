"""Checks and arithmetic of the leaves of gradients, for reductions and wrappers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import AxisName, PyTree, checks_varying, varying_axes
from ..mesh import axis_names
from ..tree import at_least_float32, cached_cast, cast, leaf_names


def check_varying(owner: str, grads: PyTree, axis_name: AxisName) -> None:
    """Raise `ValueError` for gradients typed as equal over an axis: jax has summed them.

    Under `shard_map` with its default check jax sums gradients of parameters that are equal over
    an axis over this axis.
    """
    tracked = [name for name in axis_names(axis_name) if checks_varying(name)]
    wrong = [
        f"{leaf} (over {name!r})"
        for leaf, grad in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True)
        for name in tracked
        if name not in varying_axes(grad)
    ]
    if wrong:
        raise ValueError(
            f"{owner}: jax has summed these gradients already: {', '.join(wrong)}. Differentiate "
            'with respect to `jax.lax.pcast(params, axis_name, to="varying")`.'
        )


def is_number(x: Any) -> bool:
    """Return whether an array can overflow: row numbers, counters and keys cannot."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def map_in_float32(change: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Return `change` of each leaf, computed in at least float32, in the dtype of the leaf.

    Integers and keys stay as they are.
    """

    def one(x: Any) -> Any:
        if not is_number(x):
            return x
        x = jnp.asarray(x)
        return cast(change(cast(x, at_least_float32(x.dtype))), x.dtype)

    return jax.tree.map(one, tree)


def unscale(grads: PyTree, scale: jax.Array) -> PyTree:
    """Return gradients divided by a scale, computed in at least float32, in their dtypes."""
    divisor = cached_cast(scale)
    return map_in_float32(lambda g: g / divisor(g.dtype), grads)
