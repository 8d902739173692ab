"""Gradients of a loss that is multiplied by a scale, and divided by it again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...tree import at_least_float32, by_dtype, cast
from ._overflow import is_number


def scaled_value_and_grad(
    loss: Callable[..., Any], scale: jax.Array, *, divides: bool = True
) -> Callable[..., Any]:
    """`jax.value_and_grad(loss, has_aux=True)` by way of the loss times a scale.

    The loss is then at least float32: the product would soon be infinite in float16.

    Args:
      loss: `(params, ...) -> (loss, aux)`.
      scale: () float.
      divides: False leaves the gradients those of the loss times the scale.
    """

    def scaled(*args: Any, **known: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(*args, **known)
        value = cast(value, at_least_float32(value.dtype))
        return value * cast(scale, value.dtype), (value, aux)

    def differentiate(*args: Any, **known: Any) -> tuple[Any, PyTree]:
        (_, own), grads = jax.value_and_grad(scaled, has_aux=True)(*args, **known)
        return own, divided(grads, scale) if divides else grads

    return differentiate


def divided(grads: PyTree, scale: jax.Array) -> PyTree:
    """Gradients of the loss, from those of the scaled loss, in their own dtypes."""
    divisor = by_dtype(scale)

    def one(g: Any) -> Any:
        if not is_number(g):
            return g
        g = jnp.asarray(g)
        wide = at_least_float32(g.dtype)
        return cast(cast(g, wide) / divisor(wide), g.dtype)

    return jax.tree.map(one, grads)
