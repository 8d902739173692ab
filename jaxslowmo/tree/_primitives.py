"""What is done to thousands of leaves, by a primitive each.

While a program is traced `jax.numpy` takes two to four times as long for the same equation: it
looks for promotion, broadcasting and NumPy's other rules, which leaves of one shape and dtype do
not need. NumPy arrays stay NumPy arrays.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`."""
    if not isinstance(x, jax.Array):
        return x.astype(dtype)
    if x.dtype == dtype and not jax.typeof(x).weak_type:
        return x
    return lax.convert_element_type(x, dtype)


def added(x: Any, y: Any) -> Any:
    """`x + y`."""
    return lax.add(x, y) if _are_alike(x, y) else x + y


def subtracted(x: Any, y: Any) -> Any:
    """`x - y`."""
    return lax.sub(x, y) if _are_alike(x, y) else x - y


def by_dtype(scalar: jax.Array) -> Callable[[Any], jax.Array]:
    """`scalar` in a given dtype, cast once for each."""
    return functools.cache(lambda dtype: cast(scalar, dtype))


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`x.reshape(shape)`, for sizes that are all given."""
    return lax.reshape(x, shape) if isinstance(x, jax.Array) else x.reshape(shape)


def split(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of these sizes, one behind the other; what is left at the end is dropped."""
    if not isinstance(flat, jax.Array):
        ends = itertools.accumulate(sizes)
        return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    rest = flat.size - sum(sizes)
    if len(sizes) == 1 and not rest:
        return [flat]
    # One equation, which becomes a slice per part when it is lowered.
    return list(lax.split(flat, (*sizes, rest) if rest else sizes))[: len(sizes)]


def zeros_like(x: Any) -> jax.Array:
    """`jnp.zeros_like(x)` of an array or type; traced, it is equal over all mapped axes by type."""
    if isinstance(x, core.Tracer):
        x = jax.typeof(x)
    elif not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros_like(x)
    return lax.broadcast(np.zeros([], x.dtype), x.shape, out_sharding=x.sharding)


def kept_if(keep: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where the () bool `keep` is True, else zeros."""
    return lax.select(keep, x, zeros_like(x))


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
        return False
    return x.shape == y.shape and x.dtype == y.dtype
