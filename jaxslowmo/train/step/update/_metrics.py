"""The metrics of a loss function, any tree of arrays, and their means over devices and batches.

Half precision and booleans become float32. Integers stay integers where no mean is taken; means of
integers are float32. All other dtypes are kept.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...._support.types import PyTree
from ....tree import at_least_float32

Metrics = dict[str, Any]


def with_loss(metrics: Mapping[str, Any], loss: jax.Array) -> Metrics:
    """Return a loss function's metrics with the loss.

    Raises:
      ValueError: a metric called "loss" or "weight".
    """
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
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(at_least_float32(x.dtype))
    return x


def averaged(metrics: PyTree) -> PyTree:
    """Return metrics, arrays or types, in dtypes that hold their means."""

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return x
        is_type = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.float32) if is_type else x.astype(jnp.float32)

    return jax.tree.map(one, metrics)
