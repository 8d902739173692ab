"""Loaders that take batches from an iterator, on request or ahead in a thread."""

import array
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
import numpy as np

from ..._support.types import PyTree
from ._input_report import Clock

# Attributes of objects whose memory other libraries can share.
_INTERFACES = ("__array_interface__", "__dlpack__")
_LOCK = threading.Lock()
_SHARED: "weakref.WeakValueDictionary[int, SharedIterator]" = weakref.WeakValueDictionary()


class Loaded(NamedTuple):
    """A batch as its iterator returned it.

    Attributes:
      batch: a `WeightedBatch`, or whatever the step takes.
      position: what the iterator's `get_state()` returned right after the batch; None without one.
    """

    batch: PyTree
    position: Any


class SharedIterator:
    """An iterator whose batches are taken one at a time, by whichever thread; see `shared`."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self.iterator = iterator
        self._lock = threading.Lock()
        self._last: Any = None

    def take(self, *, waits: bool = False) -> Loaded | None:
        """Return the next batch, or None after the last; raise what the iterator raises.

        Args:
          waits: whether the batch will wait for its turn. Then its arrays of the host are copied,
            since the iterator may fill them again meanwhile.
        """
        with self._lock:
            try:
                batch = next(self.iterator)
            except StopIteration:
                return None
            self._last = self._position()
            # New containers: an iterator may put new arrays into the same dict each time.
            batch = jax.tree.map(_copied if waits else lambda leaf: leaf, batch)
            return Loaded(batch, self._last)

    def position(self) -> Any:
        """Return what `get_state()` returns now; None for iterators without one.

        While another thread takes a batch, this returns the position before that batch.
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
        # Some iterators return a container that they change later.
        return copy.deepcopy(position) if isinstance(position, dict | list) else position


def _copied(leaf: Any) -> Any:
    """Return a copy of a leaf whose memory others may write: NumPy arrays, torch tensors, buffers.

    Objects in arrays of objects are not copied.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.copy("K")
    if isinstance(leaf, memoryview):
        return np.array(leaf)
    is_buffer = isinstance(leaf, bytearray | array.array)
    if not is_buffer and not any(hasattr(leaf, name) for name in _INTERFACES):
        return leaf
    return leaf if isinstance(leaf, jax.Array | np.generic) else copy.deepcopy(leaf)


def shared(iterator: Iterator[PyTree]) -> SharedIterator:
    """Return the one `SharedIterator` of an iterator; two threads must not enter a generator."""
    with _LOCK:
        source = _SHARED.get(id(iterator))
        if source is None:  # the new one holds the iterator, so that its id is not used again
            source = _SHARED[id(iterator)] = SharedIterator(iterator)
        return source


def at_most(
    iterator: Iterator[PyTree], num_steps: int | None, per_step: int = 1
) -> Iterator[PyTree]:
    """Return an iterator over the batches of the first `num_steps` steps; None: all batches."""
    return iterator if num_steps is None else _AtMost(iterator, num_steps * per_step)


class _AtMost(Iterator[PyTree]):
    def __init__(self, iterator: Iterator[PyTree], count: int) -> None:
        self._source, self._left = shared(iterator), count
        self._position = self._source.position()

    def __next__(self) -> PyTree:
        loaded = self._source.take() if self._left > 0 else None
        if loaded is None:
            raise StopIteration
        self._left -= 1
        self._position = loaded.position
        return loaded.batch

    def get_state(self) -> Any:
        return self._position


# How long closing a loader, or the exit of the process, waits for a batch that is being loaded.
ENDING_SECONDS = 1.0
# How often a call that waits checks that the thread of the loader is alive.
_LOOK_SECONDS = 1.0


class EndOfBatches(NamedTuple):
    """The end of an iterator.

    Attributes:
      error: exception that the iterator raised; None if there was no further batch.
      traceback: traceback of the error from within the iterator.
    """

    error: BaseException | None = None
    traceback: TracebackType | None = None


class Direct:
    """A loader that takes each batch when it is requested, in the calling thread.

    Args:
      source: iterator of the batches.
      clock: timer of the calls of the iterator.
    """

    def __init__(self, source: SharedIterator, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._is_finished = False

    def allow(self, count: int) -> None:
        """Do nothing: no batch is loaded ahead."""

    def take(
        self, *, wait: bool = True, timeout: float | None = None
    ) -> Loaded | EndOfBatches | None:
        """Return the next batch, or the end; None with `wait=False`."""
        del timeout  # an iterator cannot be interrupted
        if self._is_finished:
            return EndOfBatches()
        return _taken(self._source.take, self._clock) if wait else None

    def finish(self) -> None:
        """Take no further batch."""
        self._is_finished = True

    close = finish


class Loader:
    """A loader that takes batches ahead in its own thread, up to a number that is allowed.

    The thread ends with the iterator, with `finish` or `close`, or when nothing references the
    loader.

    Args:
      source: iterator of the batches.
      clock: timer of the calls of the iterator.
    """

    def __init__(self, source: SharedIterator, clock: Clock) -> None:
        self._queue = _Queue()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # keep settings such as numpy.errstate
            args=(_load, source, self._queue, clock),
            name="jaxslowmo-loader",
            daemon=True,
        )
        weakref.finalize(self, self._queue.close).atexit = False
        _RUNNING.add(self)
        self._thread.start()

    def allow(self, count: int) -> None:
        """Let the thread load until `count` batches are loaded and not taken yet."""
        self._queue.allow(count)

    def take(
        self, *, wait: bool = True, timeout: float | None = None
    ) -> Loaded | EndOfBatches | None:
        """Return the next batch; after the last batch return the end at every call.

        Args:
          wait: whether to wait for the batch; if False, return None if none is loaded yet.
          timeout: seconds after which to return None; None waits without a limit.

        Raises:
          RuntimeError: the thread no longer exists, as in a forked process.
        """
        limit = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            seconds = min(limit - time.monotonic(), _LOOK_SECONDS) if wait else 0.0
            item = self._queue.take(seconds)
            if item is not None or seconds <= 0:
                return item
            if not self._thread.is_alive() and not self._queue.is_ready:
                raise RuntimeError(
                    "the thread that loads batches is gone, as in a process that was forked: make "
                    "the pipeline in the process that uses it."
                )

    def finish(self) -> None:
        """Load no further batch; those loaded, or being loaded, can still be taken."""
        self._queue.finish()

    def close(self) -> None:
        """End the thread; wait at most a second for a batch that is being loaded."""
        self._queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join(ENDING_SECONDS)


class _Queue:
    """The state that a thread shares with its loader; the thread must not keep that alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[Loaded | EndOfBatches] = deque()
        self._allowed = 0
        self._is_finished = False
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return bool(self._items)

    def allow(self, count: int) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def wait_for_room(self) -> bool:
        """Wait for permission to load a batch; return False if `finish` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_finished or len(self._items) < self._allowed)
            return not self._is_finished

    def put(self, item: Loaded | EndOfBatches) -> None:
        with self._changed:
            if not self._is_closed:
                self._items.append(item)
            self._changed.notify_all()

    def take(self, seconds: float) -> Loaded | EndOfBatches | None:
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(lambda: self._items, seconds)
            if not self._items or isinstance(self._items[0], EndOfBatches):
                return self._items[0] if self._items else None
            self._allowed -= 1  # the caller counts the batches that it has taken
            return self._items.popleft()

    def finish(self) -> None:
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_finished = self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


def _load(source: SharedIterator, queue: _Queue, clock: Clock) -> None:
    while queue.wait_for_room():
        item = _taken(partial(source.take, waits=True), clock)
        queue.put(item)
        if isinstance(item, EndOfBatches):
            return
        del item  # else the batch would stay in memory until the next one is loaded
    queue.put(EndOfBatches())


def _taken(take: Callable[[], Loaded | None], clock: Clock) -> Loaded | EndOfBatches:
    try:
        loaded = clock(take)
    except BaseException as error:  # raised by the call that needs this batch
        return EndOfBatches(error, error.__traceback__)
    if loaded is None:
        clock.count -= 1  # it counts batches, and this call returned none
        return EndOfBatches()
    return loaded


_RUNNING: "weakref.WeakSet[Loader]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Close all loaders: a thread inside a library while Python exits may abort the process."""
    for loader in list(_RUNNING):
        loader.close()
