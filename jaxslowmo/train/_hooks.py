"""Hooks of the training loop."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from .._typing import AxisName, PyTree
from ..algorithms import Every, as_schedule
from ..mesh import AnyMesh, consensus
from ._result import StepResult


class Hook(Protocol):
    """Something that happens every few steps.

    Attributes:
      every: an int k (steps k, 2k, ...) or a `js.every` schedule.
    """

    @property
    def every(self) -> int | Every:
        """When it is due."""
        ...

    def __call__(self, result: StepResult) -> Mapping[str, Any] | None:
        """Called after a due step; a returned mapping is merged into `result.reports`."""
        ...


def is_hook_due(hook: Hook, step: int) -> bool:
    """Whether `hook` runs after step 1, 2, ...; `ValueError` for a period below 1."""
    return bool(as_schedule(hook.every, "every")(step))


def host_mean(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """Metrics averaged over replicas on the host; waits for them.

    Where the step was given weights, they are in the metrics and the averages are weighted.

    Args:
      metrics: arrays with a leading replica axis, as a step returns them.

    Returns:
      One float per metric: the mean over this process's replicas.

    Communication: none between replicas; device to host.
    """

    def of_replicas(value: jax.Array) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(s.data, np.float64)) for s in _once(value)])

    weights = of_replicas(metrics["weight"]) if "weight" in metrics else None
    means = {}
    for name, value in metrics.items():
        each = of_replicas(value)
        # A replica without data reports zeros; if all here have none, so does the mean.
        use = weights if name != "weight" and weights is not None and weights.any() else None
        means[name] = float(np.average(each, weights=use))
    return means


def _once(value: jax.Array) -> list[jax.Shard]:
    """The shards of this process, without copies of one on several devices."""
    return list({str(shard.index): shard for shard in value.addressable_shards}.values())


class Log:
    """Hook that writes the step's metrics, averaged over replicas, and earlier hooks' reports.

    Args:
      write: called with one flat dict: step, metrics, reports.
      every: period in steps, or a schedule.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], *, every: int | Every = 10) -> None:
        self.every = every
        self._write = write

    def __call__(self, result: StepResult) -> None:
        """Write one record."""
        self._write({"step": result.step, **host_mean(result.metrics), **result.reports})


class Evaluate:
    """Hook that evaluates the consensus model: the mean of the replicas.

    Args:
      evaluate: `evaluate(params, model_state) -> dict`, given one averaged copy of each.
      mesh: the step's mesh.
      axis_name: the replica axis.
      every: period in steps, or a schedule.

    Communication: one all-reduce of parameters and model state over `axis_name` per evaluation
    (not counted in the step's report).
    """

    def __init__(
        self,
        evaluate: Callable[[PyTree, PyTree], Mapping[str, Any]],
        *,
        mesh: AnyMesh,
        axis_name: AxisName = "replica",
        every: int | Every = 100,
    ) -> None:
        self.every = every
        self._evaluate, self._mesh, self._axis_name = evaluate, mesh, axis_name

    def __call__(self, result: StepResult) -> Mapping[str, Any]:
        """Evaluate the consensus of the state after this step."""
        params, model_state = consensus(
            (result.state.params, result.state.model_state),
            mesh=self._mesh,
            axis_name=self._axis_name,
        )
        return self._evaluate(params, model_state)
