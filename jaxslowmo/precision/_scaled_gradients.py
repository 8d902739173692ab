"""Gradients of a loss that is multiplied by a scale, and divided by it again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._typing import PyTree
from ..tree import at_least_float32, by_dtype, cast
from ._overflow import is_number


def scaled_value_and_grad(loss: Callable[..., Any], scale: jax.Array | None) -> Callable[..., Any]:
    """`jax.value_and_grad(loss, has_aux=True)` by way of the loss times a scale.

    The loss is then at least float32: the product would soon be infinite in float16.

    Args:
      loss: `(params, ...) -> (loss, aux)`.
      scale: () float; None: not by way of anything.
    """
    if scale is None:
        return jax.value_and_grad(loss, has_aux=True)

    def scaled(*args: Any, **known: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(*args, **known)
        value = cast(value, at_least_float32(value.dtype))
        return value * cast(scale, value.dtype), (value, aux)

    def differentiate(*args: Any, **known: Any) -> tuple[Any, PyTree]:
        (_, own), grads = jax.value_and_grad(scaled, has_aux=True)(*args, **known)
        return own, divided(grads, scale)

    return differentiate


class Unscaled:
    """True, as `unscaled=` of a loss scale, and knows whether one has asked."""

    def __init__(self) -> None:
        self._was_asked = False

    def __bool__(self) -> bool:
        self._was_asked = True
        return True

    @classmethod
    @contextlib.contextmanager
    def heard(cls) -> Iterator["Unscaled"]:
        """One to be passed on in the block.

        Raises:
          ValueError: something did not pass it on, so that gradients would be divided twice.
        """
        said = cls()
        try:
            yield said
        except TypeError as error:
            if is_about_keywords(error):
                raise ValueError(_NOT_HEARD) from error
            raise
        if not said._was_asked:
            raise ValueError(_NOT_HEARD)


_NOT_HEARD = (
    "dynamic_loss_scale: stands inside of a transform, or beside one, that does not pass on what "
    "`update` is told, such as optax.contrib.sam, optax.contrib.split_real_and_imaginary or an "
    "optax.GradientTransformation of two functions, so gradients would be divided by the scale "
    "twice: put js.dynamic_loss_scale around it."
)


def is_about_keywords(error: TypeError) -> bool:
    """Whether a function was given keyword arguments that it does not take."""
    return "unexpected keyword argument" in str(error)


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
