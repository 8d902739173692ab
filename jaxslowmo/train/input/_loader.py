"""Batches from an iterator, also in a thread that takes them before they are asked for."""

import atexit
import contextvars
import copy
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import jax

from ..._support.types import PyTree
from ._changed import Sample, sample_of
from ._input_report import Clock

_LOCK = threading.Lock()
_SHARED: "weakref.WeakValueDictionary[int, SharedIterator]" = weakref.WeakValueDictionary()


class Loaded(NamedTuple):
    """A batch as its iterator gave it.

    Attributes:
      batch: a `WeightedBatch`, or whatever the step takes.
      position: what the iterator's `get_state()` said right after; None without one.
      sample: checksums of its arrays, which tell whether they change; None where the batch does not
        wait for its turn.
    """

    batch: PyTree
    position: Any
    sample: Sample | None


class SharedIterator:
    """An iterator whose batches are taken one at a time, by whichever thread; see `shared`."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self.iterator = iterator
        self._lock = threading.Lock()
        self._last: Any = None

    def take(self, *, waits: bool = False) -> Loaded | None:
        """Return the next batch, None after the last; raise what the iterator does.

        Args:
          waits: whether the batch will wait for its turn, so that its arrays may change meanwhile.
        """
        with self._lock:
            try:
                batch = next(self.iterator)
            except StopIteration:
                return None
            self._last = self._position()
            # Containers of its own: an iterator may put other arrays into the same dict each time.
            batch = jax.tree.map(lambda leaf: leaf, batch)
            return Loaded(batch, self._last, sample_of(batch) if waits else None)

    def position(self) -> Any:
        """What `get_state()` says now; None for iterators without one.

        While another thread waits for a batch, what it said before.
        """
        if not self._lock.acquire(blocking=False):
            return self._last
        try:
            return self._position()
        finally:
            self._lock.release()

    def _position(self) -> Any:
        get_state = getattr(self.iterator, "get_state", None)
        if get_state is None:
            return None
        position = get_state()
        # Some iterators hand out what they then go on to change.
        return copy.deepcopy(position) if isinstance(position, dict | list) else position


def shared(iterator: Iterator[PyTree]) -> SharedIterator:
    """The one `SharedIterator` of an iterator: a generator that two threads enter is an error."""
    with _LOCK:
        found = _SHARED.get(id(iterator))
        if found is None:  # which holds the iterator, so that its id stays its own
            found = _SHARED[id(iterator)] = SharedIterator(iterator)
        return found


def at_most(
    iterator: Iterator[PyTree], num_steps: int | None, per_step: int = 1
) -> Iterator[PyTree]:
    """The batches of the first steps, or all: no more are taken from it."""
    return iterator if num_steps is None else _AtMost(iterator, num_steps * per_step)


class _AtMost(Iterator[PyTree]):
    def __init__(self, iterator: Iterator[PyTree], count: int) -> None:
        self._source, self._left = shared(iterator), count
        self._position = self._source.position()

    def __next__(self) -> PyTree:
        found = self._source.take() if self._left > 0 else None
        if found is None:
            raise StopIteration
        self._left -= 1
        self._position = found.position
        return found.batch

    def get_state(self) -> Any:
        return self._position


# How long the end of a loader, or of the process, waits for a batch that is being loaded.
ENDING_SECONDS = 1.0
# How often a call that waits looks whether there is still a thread to wait for.
_LOOK_SECONDS = 1.0


class EndOfBatches(NamedTuple):
    """The end of an iterator.

    Attributes:
      error: that it raised; None where there was no more.
      traceback: of the error, as the iterator left it.
    """

    error: BaseException | None = None
    traceback: TracebackType | None = None


class Direct:
    """Takes each batch of an iterator when it is asked for, in the thread that asks.

    Args:
      source: of the batches.
      clock: of the time that the iterator takes.
    """

    def __init__(self, source: SharedIterator, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._is_finished = False

    def allow(self, count: int) -> None:
        """Nothing is loaded that was not asked for."""

    def take(
        self, *, wait: bool = True, timeout: float | None = None
    ) -> Loaded | EndOfBatches | None:
        """The next batch, or the end; None where nobody wants to wait for one."""
        del timeout  # nothing can interrupt an iterator
        if self._is_finished:
            return EndOfBatches()
        return _taken(self._source.take, self._clock) if wait else None

    def finish(self) -> None:
        """Take no further batch."""
        self._is_finished = True

    close = finish


class Loader:
    """Takes batches of an iterator in a thread of its own, up to a number that is allowed.

    The thread ends with the iterator, with `finish` or `close`, or when nothing holds the loader.

    Args:
      source: of the batches.
      clock: of the time that the iterator takes.
    """

    def __init__(self, source: SharedIterator, clock: Clock) -> None:
        self._queue = _Queue()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # with what holds here, such as numpy.errstate
            args=(_load, source, self._queue, clock),
            name="jaxslowmo-loader",
            daemon=True,
        )
        weakref.finalize(self, self._queue.close).atexit = False
        _RUNNING.add(self)
        self._thread.start()

    def allow(self, count: int) -> None:
        """Let the thread load until `count` batches are there that nobody has taken."""
        self._queue.allow(count)

    def take(
        self, *, wait: bool = True, timeout: float | None = None
    ) -> Loaded | EndOfBatches | None:
        """The next batch; after the last one the end, again and again.

        Args:
          wait: for it; else None where there is none yet.
          timeout: seconds after which to wait no longer, and return None.

        Raises:
          RuntimeError: the thread is gone, as it is in a process that was forked.
        """
        limit = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = min(limit - time.monotonic(), _LOOK_SECONDS) if wait else 0.0
            found = self._queue.take(left)
            if found is not None or left <= 0:
                return found
            if not self._thread.is_alive() and not self._queue.is_ready:
                raise RuntimeError(
                    "the thread that loads batches is gone, as in a process that was forked: make "
                    "the pipeline in the process that uses it."
                )

    def finish(self) -> None:
        """Load no further batch; those that are there, and one that is being loaded, stay."""
        self._queue.finish()

    def close(self) -> None:
        """End the thread; waits a second for a batch that is being loaded, and no longer."""
        self._queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join(ENDING_SECONDS)


class _Queue:
    """What the thread and its loader share: the thread must not keep the loader alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: deque[Loaded | EndOfBatches] = deque()
        self._allowed = 0
        self._is_finished = False
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return bool(self._found)

    def allow(self, count: int) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def wait_for_room(self) -> bool:
        """Whether another batch is wanted; waits until that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_finished or len(self._found) < self._allowed)
            return not self._is_finished

    def put(self, item: Loaded | EndOfBatches) -> None:
        with self._changed:
            if not self._is_closed:
                self._found.append(item)
            self._changed.notify_all()

    def take(self, seconds: float) -> Loaded | EndOfBatches | None:
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(lambda: self._found, seconds)
            if not self._found or isinstance(self._found[0], EndOfBatches):
                return self._found[0] if self._found else None
            self._allowed -= 1  # what was taken is held by whoever has taken it
            return self._found.popleft()

    def finish(self) -> None:
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_finished = self._is_closed = True
            self._found.clear()
            self._changed.notify_all()


def _load(source: SharedIterator, queue: _Queue, clock: Clock) -> None:
    while queue.wait_for_room():
        found = _taken(partial(source.take, waits=True), clock)
        queue.put(found)
        if isinstance(found, EndOfBatches):
            return
        del found  # or it would be kept until the next one is there
    queue.put(EndOfBatches())


def _taken(take: Callable[[], Loaded | None], clock: Clock) -> Loaded | EndOfBatches:
    try:
        found = clock(take)
    except BaseException as error:  # for the call that needs this batch
        return EndOfBatches(error, error.__traceback__)
    if found is None:
        clock.count -= 1  # of batches
        return EndOfBatches()
    return found


_RUNNING: "weakref.WeakSet[Loader]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is inside of a library while Python ends may abort the process."""
    for loader in list(_RUNNING):
        loader.close()
