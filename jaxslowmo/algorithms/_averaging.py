"""Moving the parameters to the mean of the replicas."""

from typing import Any

import jax

from .._typing import AxisName, PyTree
from ..tree import landing, updates_to
from ._blocks import replica_mean


def updates_to_mean(
    params: PyTree,
    updates: PyTree,
    axis_name: AxisName,
    *,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    param_specs: PyTree | None = None,
    weight: jax.Array | None = None,
) -> Any:
    """Updates that land on the mean of params + updates over `axis_name`.

    Communication: see `replica_mean`.
    """
    # The new parameters as the leaf's dtype holds them: that is what travels.
    y = jax.tree.map(lambda p, x: x.astype(p.dtype), params, landing(params, updates))
    mean = replica_mean(
        y, axis_name, local_axis_name, bucket_bytes, param_specs, weight, event="average"
    )
    return updates_to(params, mean)
