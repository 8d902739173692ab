"""The norm of all gradients together, and gradients times a number."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._support.types import PyTree
from ...mesh import axis_size, settle, vary_over
from ...tree import at_least_float32, by_dtype, cast, kept_if
from ..sparse import RowGradient, coalesce, is_row_gradient


def global_norm(
    tree: PyTree,
    norm: float,
    axes: tuple[str, ...],
    shares: Sequence[jax.Array | None],
    counted: Sequence[Any],
) -> jax.Array:
    """() the `norm`-norm of all numbers in `tree`, in the widest of their dtypes and float32.

    Args:
      tree: gradients of this device.
      norm: 1 or more; infinity for the largest.
      axes: mapped axes between whose devices the model is shared.
      shares: per leaf whether this device counts it; None where all do.
      counted: per leaf a mask of the elements that count, None for all.

    Communication: one all-reduce of () over `axes`; none without any of more than one position.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
    largest = np.isinf(norm)
    parts: dict[int, tuple[jax.Array | None, list[jax.Array]]] = {}
    for leaf, share, mask in zip(leaves, shares, counted, strict=True):
        if jnp.issubdtype(jnp.result_type(leaf.dtype), jnp.inexact):
            parts.setdefault(id(share), (share, []))[1].append(_of_leaf(leaf, norm, mask))
    join = jnp.maximum if largest else jnp.add
    wide = widest(leaves)

    def joined(found: Sequence[jax.Array]) -> jax.Array:
        return functools.reduce(join, [cast(x, wide) for x in found], jnp.zeros([], wide))

    # For the largest it does not matter how often something is looked at.
    total = joined(
        [
            joined(own) if share is None or largest else kept_if(share, joined(own))
            for share, own in parts.values()
        ]
    )
    if largest:  # not every backend's maximum keeps a NaN
        total = jnp.where(jnp.isnan(total), jnp.inf, total)
    if any(axis_size(axis) > 1 for axis in axes):
        total = (lax.pmax if largest else lax.psum)(vary_over(total, axes), axes)
    else:
        total = settle(total, axes)
    if largest or norm == 1:
        return total
    return jnp.sqrt(total) if norm == 2 else total ** jnp.asarray(1 / norm, wide)


def scaled(tree: PyTree, scale: jax.Array) -> PyTree:
    """Gradients times a number, in at least float32, in the dtypes that they had."""
    factor = by_dtype(scale)

    def one(x: Any) -> Any:
        if is_row_gradient(x):
            return RowGradient(x.rows, one(x.values), x.num_rows)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = at_least_float32(x.dtype)
        return cast(cast(x, wide) * factor(jnp.finfo(wide).dtype), x.dtype)

    return jax.tree.map(one, tree, is_leaf=is_row_gradient)


def _of_leaf(leaf: Any, norm: float, mask: Any) -> jax.Array:
    """() sum of powers of what is in a leaf, or the largest."""
    # A row may stand in a gradient of rows several times, and counts by its sum.
    values = coalesce(leaf).gradient.values if is_row_gradient(leaf) else jnp.asarray(leaf)
    size = jnp.abs(cast(values, at_least_float32(values.dtype)))
    if mask is not None:
        size = jnp.where(jnp.asarray(mask) != 0, size, jnp.zeros_like(size))
    if np.isinf(norm):
        return jnp.max(size, initial=0.0)
    if norm == 1:
        return jnp.sum(size)
    return jnp.sum(size * size if norm == 2 else size ** jnp.asarray(norm, size.dtype))


def widest(leaves: Sequence[Any]) -> np.dtype:
    """float32, or float64 where some leaf is in double precision."""
    dtypes = [x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in leaves]
    sizes = [jnp.finfo(kind).bits for kind in dtypes if jnp.issubdtype(kind, jnp.inexact)]
    return np.dtype(np.float64 if max(sizes, default=32) > 32 else np.float32)
