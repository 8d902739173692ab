"""Checks of the arguments and states that updates of transforms receive."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import AxisName, PyTree
from .._support.varying import checks_varying, varying_axes
from ..mesh import axis_names, axis_size
from ..tree import leaf_names, zero_unless


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """Return `updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Select instead of multiplying: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: zero_unless(alive, jnp.asarray(u)), updates)


def check_varying(owner: str, params: PyTree, updates: PyTree, axis_name: AxisName) -> None:
    """Raise `ValueError` for new parameters whose types say that they are equal on all replicas.

    For parameters that are equal over an axis, `shard_map` with its default check sums gradients
    over that axis.
    """
    tracked = [a for a in axis_names(axis_name) if axis_size(a) > 1 and checks_varying(a)]
    if not tracked:
        return
    # If an update varies, so do the new parameters.
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=False)
    missing = {
        i: ", ".join(map(repr, axes))
        for i, (p, u) in enumerate(pairs)
        if (axes := [a for a in tracked if a not in varying_axes(p) | varying_axes(u)])
    }
    if missing:
        # Naming thousands of leaves is slow, so it is done for a message only.
        names = leaf_names(params)
        wrong = [f"{names[i]} (over {axes})" for i, axes in missing.items()]
        raise ValueError(
            f"{owner}: parameters and updates must differ between replicas, and by their types "
            f"these do not, so jax has summed their gradients over the replicas already: "
            f"{', '.join(wrong)}. Give every replica its own parameters (`js.replicate`, in_specs "
            "P(axis_name)), or mark them before differentiating: `jax.lax.pcast(params, axis_name, "
            'to="varying")`.'
        )


def check_weight(owner: str, weight: Any) -> jax.Array | None:
    """Return `weight` as a () float32 array, or None.

    Raises:
      ValueError: not a real scalar, or a number of Python or NumPy that is below 0 or not finite.
    """
    if weight is None:
        return None
    # Arrays of jax are checked by type, since their values may be traced.
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != () or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
        raise ValueError(
            f"{owner}: `weight` must be a real scalar, this replica's share in the mean, got "
            f"{dtype}{list(shape)}."
        )
    if not isinstance(weight, jax.Array) and not 0 <= float(weight) < math.inf:
        raise ValueError(f"{owner}: `weight` must be >= 0 and finite, got {weight}.")
    return jnp.asarray(weight).astype(jnp.float32)
