"""From vectors in slots to one vector per bag: local and differentiable."""

from typing import Literal

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..tree import at_least_float32, leaf_names
from ._requests import OUTSIDE, PADDING
from ._table import OWNER


def pool(
    vectors: jax.Array,
    slots: jax.Array,
    pooling: Literal["sum", "mean"] | None,
    weights: jax.Array | None = None,
    position_weights: jax.Array | None = None,
) -> jax.Array:
    """The vectors of one feature, pooled in at least float32.

    Args:
      vectors: (n, dim).
      slots: (batch,) or (batch, max_length) int32; below 0 as `Requests.slots` says: padding and
        what was dropped counts as zeros, what is out of range is NaN.
      pooling: as `Table.pooling`.
      weights: of the shape of `slots`.
      position_weights: (max_length,).

    Returns:
      (batch, dim), or `(*slots.shape, dim)` without pooling, in the dtype of `vectors`.

    Communication: none.
    """
    wide = vectors.astype(at_least_float32(vectors.dtype))
    padding = (slots == PADDING)[..., None]
    # Slots below 0 would count from the end.
    inside = jnp.where(slots < 0, jnp.int32(vectors.shape[0]), slots)
    found = wide.at[inside].get(mode="fill", fill_value=0)
    found = jnp.where((slots == OUTSIDE)[..., None], jnp.nan, found)
    if weights is not None:
        # The weight of padding may be anything, and 0 times it must be 0.
        found = found * jnp.where(padding, 0, weights.astype(wide.dtype)[..., None])
    if position_weights is not None:
        factors = position_weights.astype(wide.dtype)[:, None]
        found = found * (factors if slots.ndim == 1 else factors[None])
    if pooling is None or slots.ndim == 1:
        return found.astype(vectors.dtype)
    total = jnp.sum(found, axis=1)
    if pooling == "mean":
        count = jnp.sum(~padding, axis=1, dtype=wide.dtype)
        total = total / jnp.maximum(count, 1)
    return total.astype(vectors.dtype)


def position_weights_in(params: PyTree, leaf: str, feature: str, slots: jax.Array) -> jax.Array:
    """The leaf of the dense parameters that weighs the positions of a feature.

    Raises:
      ValueError: there is none of this name, or it has another shape.
    """
    named = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    if leaf not in named:
        given = ", ".join(map(repr, named)) or "none (give `params`)"
        raise ValueError(
            f"{OWNER}: the position weights of feature {feature!r} are leaf {leaf!r} of the dense "
            f"parameters, which are {given}."
        )
    wanted = (slots.shape[1] if slots.ndim == 2 else 1,)
    if named[leaf].shape != wanted:
        raise ValueError(
            f"{OWNER}: the position weights {leaf!r} of feature {feature!r} must have the shape "
            f"{wanted}, one for each place of a bag, got {named[leaf].shape}."
        )
    return named[leaf]
