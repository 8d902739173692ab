"""What is done with a batch before its turn: on the devices, and in stages of the user's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._support.types import PyTree
from .._uneven import WeightedBatch
from ..step import bounded
from ._loader import Loaded
from ._report import Clock

Stage = Callable[[PyTree], PyTree]


class Prepared(NamedTuple):
    """A batch that is ready for the step.

    Attributes:
      batch: as the last stage left it.
      weight: of the replicas; None: all alike.
      position: of its iterator right after it.
      loaded: what it was made of.
    """

    batch: PyTree
    weight: Any
    position: Any
    loaded: Loaded


class Stages:
    """Everything that happens to a batch between its iterator and the step, in order.

    Args:
      step: whose `place(batch, weight, state=...)` comes first, where it has one.
      stages: functions `batch -> batch` that come after it; None: none, and for a step without
        `place` arrays are put on the default device.
    """

    def __init__(self, step: Any, stages: Sequence[Stage] | None) -> None:
        self._place = of_step(step, "place")
        if stages is None:
            stages = () if self._place or jax.process_count() > 1 else (put_arrays,)
        self._stages = [bounded(stage) for stage in stages]
        # Stages may make the ids: the step looks at what they return.
        self._options = {"check_ids": False} if stages else {}
        names = ["place"] if self._place else []
        self.clocks = [Clock(name) for name in [*names, *_names(stages)]]

    def __call__(self, loaded: Loaded, state: PyTree) -> Prepared:
        """Starts all of it; what devices do for it need not have ended.

        Args:
          loaded: the batch.
          state: one as the step is given, which says how batches lie.
        """
        batch, weight, clocks = loaded.batch, None, iter(self.clocks)
        if isinstance(batch, WeightedBatch):
            batch, weight = batch
        if self._place:
            place = partial(self._place, batch, weight, state=state, **self._options)
            batch, weight = next(clocks)(place)
        for stage, clock in zip(self._stages, clocks, strict=True):
            batch = clock(stage, batch)
        if self._place and self._stages:
            # What a stage has made must not be refused first where another batch has its turn.
            batch, weight = self._place(batch, weight, state=state)
        return Prepared(batch, weight, loaded.position, loaded)


def of_step(step: Any, name: str) -> Any:
    """Return a method of a step, or of the owner of one such as `step.evaluate`; None without."""
    return getattr(step, name, None) or getattr(getattr(step, "__self__", None), name, None)


def put_arrays(batch: PyTree) -> PyTree:
    """The batch with arrays of numbers on the default device; all else stays."""

    def put(x: Any) -> Any:
        is_array = isinstance(x, np.ndarray) and x.dtype.kind in "biufc"
        return jax.device_put(x) if is_array or isinstance(x, jax.Array) else x

    return jax.tree.map(put, batch)


def _names(stages: Sequence[Stage]) -> list[str]:
    names = [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
    if len(set(names)) == len(names):
        return names
    return [f"{name} {i}" for i, name in enumerate(names, 1)]
