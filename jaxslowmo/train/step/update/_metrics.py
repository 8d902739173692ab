"""The metrics of a loss function, any tree of arrays: as they are, and their means.

A mean has the dtype of what it is a mean of: half precision is summed in float32, and a mean of
integers is rounded to the nearest one. Booleans are shares of 1, in float32.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._support.types import PyTree
from ....tree import at_least_float32, cast

Metrics = dict[str, Any]


def with_loss(metrics: Mapping[str, Any], loss: jax.Array) -> Metrics:
    """Return a loss function's metrics with the loss.

    Raises:
      ValueError: metrics that are no dict with names, or one called "loss" or "weight".
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(f"`loss_fn` must return metrics as a dict with names, got {metrics!r}.")
    return joined(jax.tree.map(_as_metric, dict(metrics)), {"loss": loss}, taken=("weight",))


def joined(metrics: Metrics, more: Mapping[str, Any], taken: tuple[str, ...] = ()) -> Metrics:
    """Return the metrics of a loss function with those of the step.

    Raises:
      ValueError: a metric of the loss function with a name that the step uses.
    """
    if wrong := [name for name in (*more, *taken) if name in metrics]:
        raise ValueError(
            f"`loss_fn` returns a metric called {wrong[0]!r}, and the step has one of this name: "
            "give it another."
        )
    return {**metrics, **more}


def _as_metric(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype == jnp.bool_ else x


def quotient(total: jax.Array, count: Any, dtype: Any = None) -> jax.Array:
    """Return a sum divided by a number, in `dtype` or else in that of the sum.

    Integers are rounded to the nearest one.
    """
    dtype = total.dtype if dtype is None else np.dtype(dtype)
    if jnp.issubdtype(total.dtype, jnp.integer):
        count = jnp.asarray(count, total.dtype)
        return cast((total + count // 2) // count, dtype)
    mean = total / cast(jnp.asarray(count), total.dtype)
    return cast(jnp.round(mean) if jnp.issubdtype(dtype, jnp.integer) else mean, dtype)


def mean_of_others(metrics: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Return metrics with means over `axes` in place of all leaves that are no floats.

    Communication: one all-reduce over `axes` of these leaves.
    """
    leaves, treedef = jax.tree.flatten(metrics)
    others = [i for i, x in enumerate(leaves) if not jnp.issubdtype(x.dtype, jnp.floating)]
    wide = [cast(leaves[i], at_least_float32(leaves[i].dtype)) for i in others]
    for i, total in zip(others, lax.psum(wide, axes), strict=True):
        leaves[i] = quotient(total, lax.axis_size(axes), leaves[i].dtype)
    return treedef.unflatten(leaves)
