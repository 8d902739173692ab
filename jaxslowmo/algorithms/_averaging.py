"""Moving the parameters to the mean of the replicas."""

from typing import Any

import jax

from .._typing import AxisName, PyTree
from ..tree import apply_exactly, updates_to
from ._blocks import replica_mean
from ._protocol import Others


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
    y = apply_exactly(params, updates)
    mean = replica_mean(
        y, axis_name, local_axis_name, bucket_bytes, param_specs, weight, event="average"
    )
    return updates_to(params, mean)


def mean_of_others(others: Others, axis_name: AxisName, weight: jax.Array | None) -> Others:
    """Means over `axis_name` of what travels with the parameters; as it is if all weigh 0.

    Communication: see `replica_mean`; none for an empty list.
    """
    return replica_mean(others, axis_name, weight=weight) if others else others
