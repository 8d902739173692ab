"""Weighted means: sums that can be added up over microbatches, batches and calls."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ._leaves import add, at_least_float32, cached_cast, cast, zero_unless


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedSum:
    """The sum of trees times their weights, and the sum of these weights.

    Trees that hold it can be added leaf by leaf, as `+` does. A weight may have leading dimensions
    of the leaves, such as one of replicas.

    Attributes:
      sum: the weighted sum; leaves in at least float32.
      weight: sum of the weights, in at least float32; a leading part of the shapes of the leaves.
    """

    sum: PyTree
    weight: Any

    @classmethod
    def from_value(cls, value: PyTree, weight: jax.Array | None = None) -> Self:
        """Return one term: `value` times its weight; None counts it once.

        A value of weight 0 contributes exactly 0, even if it is NaN. Integers and booleans become
        float32.
        """
        wide = jax.tree.map(_wide_float, value)
        if weight is None:
            return cls(wide, np.ones([], np.float32))
        counts, factor = weight > 0, cached_cast(weight)

        def term(x: jax.Array) -> jax.Array:
            product = x * _expand_to_rank(factor(x.dtype), x)
            if counts.ndim == 0:
                return zero_unless(counts, product)
            return jnp.where(_expand_to_rank(counts, x), product, jnp.zeros_like(product))

        return cls(jax.tree.map(term, wide), weight)

    def __add__(self, other: "WeightedSum") -> "WeightedSum":
        return jax.tree.map(add, self, other)

    @property
    def mean(self) -> PyTree:
        """The weighted mean; zeros if the weight is 0. Leaves have the dtypes of the sum."""
        # Terms of weight 0 are zeros, and so is their sum, whatever divides it.
        divisor = cached_cast(jnp.where(self.weight > 0, self.weight, jnp.ones_like(self.weight)))
        return jax.tree.map(lambda x: x / _expand_to_rank(divisor(x.dtype), x), self.sum)


def _wide_float(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return cast(x, at_least_float32(x.dtype) if is_float else jnp.float32)


def _expand_to_rank(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return a weight with leading dimensions of `x` so that it is broadcast over the others."""
    if weight.ndim == 0:
        return weight
    return weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
