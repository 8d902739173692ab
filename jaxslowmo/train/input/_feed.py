"""The batches of a pipeline: loaded, prepared ahead in stages, and handed out one by one."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._support.types import PyTree
from .._uneven import WeightedBatch
from ..step import bounded
from ._changed import refuse_changed
from ._input_report import Clock
from ._loader import Direct, EndOfBatches, Loaded, Loader, SharedIterator, shared

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


class InputStages:
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
        # InputStages may make the ids: the step looks at what they return.
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


class Feed:
    """Prepares up to `depth` batches ahead of the one whose turn it is.

    What is loaded or prepared when another iterator comes is handed out first: nothing is lost.
    Batches are prepared in the calling thread, so what stages exchange has one order on all
    processes.

    Args:
      stages: what is done with a batch.
      depth: batches ahead; 0 loads each when it is its turn, without a thread.
      drain: hand out the last `depth` batches of an iterator, too.
      timeout: seconds that a call waits for a batch; None: for ever.
      state: returns the state that stages look at.
      looks_ahead: hand out a batch when the one behind it is there, too, or will not come: `peek`.
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
        self._held: deque[Prepared | EndOfBatches] = deque()  # errors stand where a batch would
        self._given: SharedIterator | None = None
        self._is_open = False  # nobody was told yet that the iterator given has ended
        self._loaders: deque[Loader | Direct] = deque()  # those before the last only end
        self.load_clock, self.wait_clock = Clock("load"), Clock("wait")

    @property
    def num_held(self) -> int:
        """Batches that are prepared."""
        return len(self._held)

    def give(self, iterator: Iterator[PyTree]) -> SharedIterator:
        """Go on with this iterator, unless it is the present one."""
        if self._given is None or self._given.iterator is not iterator:
            for loader in self._loaders:
                loader.finish()
            self._given, self._is_open = shared(iterator), False
        return self._given

    def next(self) -> Prepared | None:
        """The batch whose turn it is; None where there is no more.

        Raises:
          TimeoutError: it was not there in time; the next call waits for it again.
          BaseException: what the iterator or a stage raised instead of it.
        """
        if not self._is_open and self._given is not None:
            kind = Loader if self._depth else Direct
            self._loaders.append(kind(self._given, self.load_clock))
            self._is_open = True
        behind = 0 if self._drain else self._depth
        while len(self._held) <= behind and not self._has_failed:
            if not self._pull(self._depth + 1, wait=True):
                self._is_open = False
                return None
        if self._looks_ahead:
            self._hold_another()
        first = self._held.popleft()
        if isinstance(first, Prepared):
            # Not before: arrays on CPU devices may be those of the iterator, without a copy.
            if first.loaded.sample is not None:
                refuse_changed(first.loaded.batch, first.loaded.sample)
            return first
        if not self._loaders:
            self._is_open = False
        assert first.error is not None, "it stands where a batch would"
        raise first.error.with_traceback(first.traceback)

    def peek(self) -> Prepared | None:
        """The batch after the one that was handed out last, where it `looks_ahead`.

        None where there is none, and where it failed or did not come in time: whoever is to use it
        will hear of that.
        """
        first = self._held[0] if self._held else None
        return first if isinstance(first, Prepared) else None

    def prepare(self) -> None:
        """Prepare batches ahead: those that are loaded, in several processes the next one."""
        while len(self._held) < self._ahead and not self._has_failed:
            try:
                if not self._pull(self._depth, wait=self._waits):
                    break
            except TimeoutError:  # is raised again where the batch is needed
                break
        if self._loaders:
            self._loaders[0].allow(self._depth - len(self._held))

    def close(self) -> None:
        """End the threads and let go of all batches."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._held.clear()

    def _hold_another(self) -> None:
        """Wait for the batch behind the first, which is held meanwhile: Ctrl-C loses neither."""
        try:
            while len(self._held) < 2 and not self._has_failed:
                if not self._pull(self._depth + 1, wait=True):
                    break
        except TimeoutError:
            if self._waits:  # the others run a program that asks for that batch
                raise

    @property
    def _has_failed(self) -> bool:
        return bool(self._held) and isinstance(self._held[-1], EndOfBatches)

    def _pull(self, most: int, *, wait: bool) -> bool:
        """Prepare one more batch, of at most so many; False where there is none, or none yet."""
        while self._loaders:
            loader = self._loaders[0]
            loader.allow(most - len(self._held))
            found = self._taken(loader) if wait else loader.take(wait=False)
            if found is None:
                return False
            if not isinstance(found, EndOfBatches):
                self._held.append(self._prepared(found))
                return True
            self._loaders.popleft()
            if found.error is not None:
                self._held.append(found)
                return True
        return False

    def _taken(self, loader: Loader | Direct) -> Loaded | EndOfBatches:
        found = self.wait_clock(lambda: loader.take(timeout=self._timeout))
        if found is None:
            raise TimeoutError(
                f"`batches` gave none within `timeout`={self._timeout:g} s; the loader goes on, "
                "and the next call waits for the same batch."
            )
        return found

    def _prepared(self, loaded: Loaded) -> Prepared | EndOfBatches:
        try:
            return self._stages(loaded, self._state())
        except Exception as error:  # in the turn of this batch: those before it can be used
            return EndOfBatches(error, error.__traceback__)
