"""Hooks of the training loop, and what one step of it left."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from .._support.types import AxisName, Phase, PyTree
from ..algorithms import shares_of_gossip
from ..mesh import AnyMesh, consensus
from ..transform import Every, ParameterTransform, as_schedule
from ._state import TrainState


@dataclass
class StepResult:
    """What one step left.

    Attributes:
      step: number of this step in the loop, from 1.
      state: the state after it. The next step donates its buffers: read it before going on.
      metrics: stacked per replica, on the devices; reading them waits for the step.
      phase: what was exchanged, `()` for a local step; see `js.phase_name`.
      reports: what hooks returned, merged in their order.
      position: what the `get_state()` of the batches said right after the batch of this step, None
        where they have none: batches that were loaded ahead are not in it, nor those of an update
        that is not complete. Save it with the state.
      is_update: False for a batch whose gradients wait for those of the batches that follow, with
        `js.TrainPipeline(accumulate=...)`; `step` is then the number of the last update.
    """

    step: int
    state: TrainState
    metrics: dict[str, jax.Array]
    phase: Phase
    reports: dict[str, Any] = field(default_factory=dict)
    position: Any = None
    is_update: bool = True


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


def host_mean(metrics: Mapping[str, jax.Array]) -> dict[str, float | np.ndarray]:
    """Metrics averaged over replicas on the host; waits for them.

    Where the step was given weights, they are in the metrics and the averages are weighted;
    replicas of weight 0 are left out.

    Args:
      metrics: arrays `(replicas, *s)` of floats, integers or booleans, as a step returns them.

    Returns:
      The mean over this process's replicas of each metric: a float where s is (), else a NumPy
      array of shape s, float64.

    Raises:
      ValueError: a metric of which other processes hold a part of every replica.

    Communication: none between replicas; device to host.
    """
    weights = metrics.get("weight")
    given = None if weights is None or weights.ndim != 1 else _of_replicas("weight", weights)
    means: dict[str, float | np.ndarray] = {}
    for name, value in metrics.items():
        each = _of_replicas(name, value)
        mean = np.mean(each, axis=0)
        # A replica without data reports zeros; if all here have none, so does the mean.
        if name != "weight" and given is not None and given.any():
            used = given > 0
            mean = np.tensordot(given[used] / given.sum(), each[used], axes=1)
        means[name] = mean if mean.ndim else float(mean)
    return means


def _of_replicas(name: str, value: jax.Array) -> np.ndarray:
    """What the replicas of this process hold, in their order: `(replicas here, *s)`."""
    # Without copies of one block on several devices.
    shards = list({str(shard.index): shard for shard in value.addressable_shards}.values())
    blocks = [s.index[0].indices(value.shape[0]) for s in shards]
    here = sorted({row for block in blocks for row in range(*block)})
    found = np.empty((len(here), *value.shape[1:]), np.float64)
    for shard, block in zip(shards, blocks, strict=True):
        rows = slice(here.index(block[0]), here.index(block[0]) + len(range(*block)))
        found[rows, *shard.index[1:]] = shard.data
    if found.size != sum(shard.data.size for shard in shards):
        raise ValueError(
            f"host_mean: `metrics` must hold whole replicas on each process, and {name!r} is split "
            f"inside them, {value.sharding}."
        )
    return found


class Log:
    """Hook that writes the step's metrics, averaged over replicas, and earlier hooks' reports.

    Args:
      write: called with one flat dict: step, metrics as of `js.host_mean`, reports. So metrics of
        one number per replica are floats and others NumPy arrays.
      every: period in steps, or a schedule.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], *, every: int | Every = 10) -> None:
        as_schedule(every, "every")  # refuses what is no period
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
      sync: the step's transform, `step.sync`, where it is one of your own whose `shares` say how
        replicas count. None: gossip of ours weighs its replicas and counts what is in flight, as
        `step.consensus` does; of all else it is the plain mean.
      whole: as `js.consensus` takes it.

    Communication: one all-reduce of parameters and model state over `axis_name` per evaluation,
      where replicas weigh one of 4 bytes besides (not counted in the step's report).
    """

    def __init__(
        self,
        evaluate: Callable[[PyTree, PyTree], Mapping[str, Any]],
        *,
        mesh: AnyMesh,
        axis_name: AxisName = "replica",
        every: int | Every = 100,
        sync: ParameterTransform | None = None,
        whole: bool = True,
    ) -> None:
        as_schedule(every, "every")  # refuses what is no period
        self.every = every
        self._evaluate, self._mesh, self._axis_name = evaluate, mesh, axis_name
        self._sync, self._whole = sync, whole

    def __call__(self, result: StepResult) -> Mapping[str, Any]:
        """Evaluate the consensus of the state after this step."""
        state = result.state
        mean = functools.partial(
            consensus, mesh=self._mesh, axis_name=self._axis_name, whole=self._whole
        )
        if self._sync is None:
            shares = shares_of_gossip(state.opt_state)
        else:
            shares = self._sync.shares(state.opt_state[-1])
        return self._evaluate(mean(state.params, shares=shares), mean(state.model_state))
