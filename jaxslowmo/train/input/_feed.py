"""The batches of a pipeline: loaded, prepared ahead in stages, and handed out one by one."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._support.types import PyTree
from .._uneven import WeightedBatch
from ..step import BoundedStep
from ._input_report import Clock
from ._loader import Direct, EndOfBatches, Loaded, Loader, SharedIterator, shared

Stage = Callable[[PyTree], PyTree]


class Prepared(NamedTuple):
    """A batch that is ready for the step.

    Attributes:
      batch: output of the last stage.
      weight: weights of the replicas; None: all equal.
      position: position of the iterator right after this batch.
    """

    batch: PyTree
    weight: Any
    position: Any


class InputStages:
    """The functions that a batch goes through between its iterator and the step, in order.

    Args:
      step: the step; if it has `place(batch, weight, state=...)`, that is the first stage.
      stages: functions `batch -> batch` that follow it. None: no function, but for a step without
        `place` in one process arrays are put on the default device.
    """

    def __init__(self, step: Any, stages: Sequence[Stage] | None) -> None:
        self._place = step_method(step, "place")
        if stages is None:
            stages = () if self._place or jax.process_count() > 1 else (put_arrays,)
        self._stages = [BoundedStep(stage) for stage in stages]
        # Stages may make the ids of tables, so ids are checked after the last stage.
        self._options = {"check_ids": False} if stages else {}
        names = ["place"] if self._place else []
        self.clocks = [Clock(name) for name in [*names, *_names(stages)]]

    def __call__(self, loaded: Loaded, state: PyTree) -> Prepared:
        """Run all stages on a batch without waiting for the devices, and return the result.

        Args:
          loaded: the batch.
          state: a state of the step, which determines how batches are placed.
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
            # Check the output of the stages now: later the error would come with another batch.
            batch, weight = self._place(batch, weight, state=state)
        return Prepared(batch, weight, loaded.position)


def step_method(step: Any, name: str) -> Any:
    """Return a method of a step, or of the object whose method the step is; None if missing."""
    return getattr(step, name, None) or getattr(getattr(step, "__self__", None), name, None)


def put_arrays(batch: PyTree) -> PyTree:
    """Return the batch with numeric arrays on the default device; other leaves stay."""

    def put(x: Any) -> Any:
        is_array = isinstance(x, np.ndarray) and x.dtype.kind in "biufc"
        return jax.device_put(x) if is_array or isinstance(x, jax.Array) else x

    return jax.tree.map(put, batch)


def _names(stages: Sequence[Stage]) -> list[str]:
    names = [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
    if len(set(names)) == len(names):
        return names
    return [f"{name} {i}" for i, name in enumerate(names, 1)]


class Feed:
    """A queue that prepares up to `depth` batches ahead of the one that is returned next.

    If another iterator is passed, batches that are loaded or prepared are returned first, so none
    is lost. Batches are prepared in the calling thread, so that the communication of stages has
    the same order on all processes.

    Args:
      stages: stages that prepare a batch.
      depth: number of batches to prepare ahead; 0 loads each when it is needed, without a thread.
      drain: whether to return the last `depth` batches of an iterator, too.
      timeout: seconds that a call waits for a batch; None waits without a limit.
      state: function that returns the state for the stages.
      looks_ahead: whether to return a batch only once the next one is prepared, or known not to
        come, so that `peek` can return it.
    """

    def __init__(
        self,
        stages: InputStages,
        *,
        depth: int,
        drain: bool,
        timeout: float | None,
        state: Callable[[], PyTree],
        looks_ahead: bool = False,
    ) -> None:
        self._stages, self._depth, self._drain = stages, depth, drain
        self._timeout, self._state, self._looks_ahead = timeout, state, looks_ahead
        # Several processes must prepare the same batches between the same two steps.
        self._waits = jax.process_count() > 1
        self._ahead = min(depth, 1) if self._waits else depth
        self._held: deque[Prepared | EndOfBatches] = deque()  # errors take the place of a batch
        self._source: SharedIterator | None = None
        self._is_open = False  # a loader takes from `_source`, whose end was not reported
        self._loaders: deque[Loader | Direct] = deque()  # all but the last only finish
        self.load_clock, self.wait_clock = Clock("load"), Clock("wait")

    @property
    def num_held(self) -> int:
        """The number of batches that are prepared."""
        return len(self._held)

    def give(self, iterator: Iterator[PyTree]) -> SharedIterator:
        """Take batches from this iterator from now on, and return its `SharedIterator`."""
        if self._source is None or self._source.iterator is not iterator:
            for loader in self._loaders:
                loader.finish()
            self._source, self._is_open = shared(iterator), False
        return self._source

    def next(self) -> Prepared | None:
        """Return the next batch, or None after the last one.

        Raises:
          TimeoutError: the batch did not come in time; the next call waits for it again.
          BaseException: what the iterator or a stage raised instead of the batch.
        """
        if not self._is_open and self._source is not None:
            kind = Loader if self._depth else Direct
            self._loaders.append(kind(self._source, self.load_clock))
            self._is_open = True
        num_kept = 0 if self._drain else self._depth
        while len(self._held) <= num_kept and not self._has_failed:
            if not self._pull(self._depth + 1, wait=True):
                self._is_open = False
                return None
        if self._looks_ahead:
            self._hold_another()
        first = self._held.popleft()
        if isinstance(first, Prepared):
            return first
        if not self._loaders:
            self._is_open = False
        assert first.error is not None, "only an end with an error is held"
        raise first.error.with_traceback(first.traceback)

    def peek(self) -> Prepared | None:
        """Return the batch after the one that was returned last, with `looks_ahead`.

        None if there is none, or if it failed or did not come in time; `next` raises in that case.
        """
        first = self._held[0] if self._held else None
        return first if isinstance(first, Prepared) else None

    def prepare(self) -> None:
        """Prepare the batches that are loaded, or in several processes wait for the next one."""
        while len(self._held) < self._ahead and not self._has_failed:
            try:
                if not self._pull(self._depth, wait=self._waits):
                    break
            except TimeoutError:  # raised again when the batch is needed
                break
        if self._loaders:
            self._loaders[0].allow(self._depth - len(self._held))

    def close(self) -> None:
        """End the threads and drop all batches."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._held.clear()

    def _hold_another(self) -> None:
        """Wait until a second batch is held; the first stays held, so that Ctrl-C loses neither."""
        try:
            while len(self._held) < 2 and not self._has_failed:
                if not self._pull(self._depth + 1, wait=True):
                    break
        except TimeoutError:
            if self._waits:  # the other processes run a program that needs that batch
                raise

    @property
    def _has_failed(self) -> bool:
        return bool(self._held) and isinstance(self._held[-1], EndOfBatches)

    def _pull(self, limit: int, *, wait: bool) -> bool:
        """Hold one more batch, at most `limit`; return False if there is none (yet)."""
        while self._loaders:
            loader = self._loaders[0]
            loader.allow(limit - len(self._held))
            item = self._taken(loader) if wait else loader.take(wait=False)
            if item is None:
                return False
            if not isinstance(item, EndOfBatches):
                self._held.append(self._prepared(item))
                return True
            self._loaders.popleft()
            if item.error is not None:
                self._held.append(item)
                return True
        return False

    def _taken(self, loader: Loader | Direct) -> Loaded | EndOfBatches:
        item = self.wait_clock(lambda: loader.take(timeout=self._timeout))
        if item is None:
            raise TimeoutError(
                f"`batches` gave none within `timeout`={self._timeout:g} s; the loader goes on, "
                "and the next call waits for the same batch."
            )
        return item

    def _prepared(self, loaded: Loaded) -> Prepared | EndOfBatches:
        try:
            return self._stages(loaded, self._state())
        except Exception as error:  # raised later, in the turn of this batch
            return EndOfBatches(error, error.__traceback__)
