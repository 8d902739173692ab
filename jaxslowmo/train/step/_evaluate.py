"""A forward pass as one replica sees it."""

import jax
import jax.numpy as jnp

from ..._scopes import METRICS, MODEL_STATE
from ..._typing import PyTree
from ...mesh import axis_names, own_keys, vary_over
from ...transform import unless_idle
from .._state import TrainState
from ._model_state import from_first_replica, mean_over, vary_statistics
from ._replica_step import Metrics, StepParts


def evaluated(
    parts: StepParts,
    state: TrainState,
    batch: PyTree,
    weight: jax.Array | None,
    inner_axes: tuple[str, ...],
) -> Metrics:
    """Metrics of one replica's batch, or of what one of its devices along `inner_axes` has of it.

    Communication: over inner axes one all-reduce of the metrics; of the model state over the
      replicas where replica 0's is broadcast.
    """
    _, key = jax.random.split(state.rng)
    for name in inner_axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(name))
    seen = state.model_state
    if parts.model_state == "broadcast":
        with jax.named_scope(f"{MODEL_STATE}/broadcast"):
            seen = from_first_replica(seen, parts.axis_name)
    axes = (*axis_names(parts.axis_name), *inner_axes)
    seen = own_keys(vary_statistics(seen, axes), inner_axes)
    params = vary_over(state.params, axes)
    value, (metrics, _) = parts.loss(params, batch, rng=key, model_state=seen)
    metrics = {name: jnp.asarray(m, jnp.float32) for name, m in metrics.items()}
    metrics["loss"] = value
    if inner_axes:
        with jax.named_scope(METRICS):
            metrics = mean_over(metrics, inner_axes)
    if weight is not None:
        metrics = {**unless_idle(metrics, weight), "weight": weight}
    return metrics
