"""Batches of iterators, loaded when they are needed or ahead of that in a thread, and timed."""

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
from typing import Any, NamedTuple

import jax
import numpy as np

from .._support.types import PyTree
from ._uneven import WeightedBatch

# Attributes of objects whose memory other libraries can share.
_INTERFACES = ("__array_interface__", "__dlpack__")
# How long `Loader.close`, or the exit of the process, waits for a batch that is being loaded.
ENDING_SECONDS = 1.0


class Clock:
    """A counter and timer of calls, which a jax profiler trace shows as `jaxslowmo.input/NAME`.

    Args:
      name: name of the stage.

    Attributes:
      name: name of the stage.
      count: number of calls that returned.
      seconds: total time of all calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seconds = 0.0

    def __call__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return `fn(*args, **options)` and add the time of the call.

        Raises:
          RuntimeError: `fn` raised StopIteration, which would look like the end of the batches.
        """
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(f"jaxslowmo.input/{self.name}"):
                result = fn(*args, **options)
        except StopIteration as error:
            raise RuntimeError(f"{self.name} of a pipeline raised StopIteration") from error
        finally:
            self.seconds += time.perf_counter() - began
        self.count += 1
        return result


class Batch(NamedTuple):
    """A batch of a pipeline, as its iterator returned it or ready for the step.

    Attributes:
      batch: tree of arrays, or whatever the step takes.
      weight: weights of the replicas; None: all equal.
      position: what the iterator's `get_state()` returned right after the batch; None without one.
    """

    batch: PyTree
    weight: Any
    position: Any


class SharedIterator:
    """An iterator whose batches are taken one at a time, by any thread; see `shared_iterator`."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self.iterator = iterator
        self._lock = threading.Lock()
        self._last: Any = None

    def take(self, *, waits: bool = False) -> Batch | None:
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
            if waits:
                # New containers, too: an iterator may put new arrays into the same dict each time.
                batch = jax.tree.map(copy_leaf, batch)
            batch, weight = batch if isinstance(batch, WeightedBatch) else (batch, None)
            return Batch(batch, weight, self._last)

    def position(self) -> Any:
        """Return what `get_state()` returns now; None for iterators without one.

        While another thread takes a batch, this returns the position before that batch.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._last = self._position()
            finally:
                self._lock.release()
        return self._last

    def _position(self) -> Any:
        get_state = getattr(self.iterator, "get_state", None)
        position = None if get_state is None else get_state()
        # Some iterators return a container that they change later.
        return copy.deepcopy(position) if isinstance(position, dict | list) else position


def copy_leaf(leaf: Any) -> Any:
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


_SHARED: "weakref.WeakValueDictionary[int, SharedIterator]" = weakref.WeakValueDictionary()


def shared_iterator(iterator: Iterator[PyTree]) -> SharedIterator:
    """Return the one `SharedIterator` of an iterator; two threads must not enter a generator."""
    # It holds the iterator, so that its id is not used again.
    return _SHARED.setdefault(id(iterator), SharedIterator(iterator))


class Loader:
    """The batches of one iterator after the other: loaded in a thread, or by the call for them.

    What an iterator raises takes the place of a batch. The thread ends at the end of an iterator
    and with `close`. It holds the loader, so the loader must hold nothing that closes it.

    Args:
      is_ahead: whether a thread loads batches before they are requested.
      timeout: seconds that `take` waits for the thread; None: no limit.

    Attributes:
      source: the iterator of the next batches; None before the first `set_source`.
      num_left: number of batches to load at most; at first there is no limit.
      clock: timer of the calls of the iterators.
    """

    def __init__(self, *, is_ahead: bool, timeout: float | None) -> None:
        self.source: SharedIterator | None = None
        self.num_left = math.inf
        self.clock = Clock("load")
        self._is_ahead, self._timeout = is_ahead, timeout
        self._changed = threading.Condition()
        self._items: deque[Batch | BaseException] = deque()
        self._quota = 0  # batches that may be loaded and not taken
        self._is_loading = self._is_closed = False  # loading: the end of `source` was not reached
        self._thread: threading.Thread | None = None

    def set_source(self, iterator: Iterator[PyTree]) -> SharedIterator:
        """Take the next batches from this iterator, and return its `SharedIterator`."""
        self.source = shared_iterator(iterator)
        return self.source

    def open(self) -> None:
        """Ask the iterator for batches, also if it has ended before."""
        if self._is_loading:
            return
        self._is_loading = True
        if self._is_ahead:
            self._thread = threading.Thread(
                target=contextvars.copy_context().run,  # keep settings such as numpy.errstate
                args=(self._run,),
                name="jaxslowmo-loader",
                daemon=True,
            )
            _RUNNING.add(self)
            self._thread.start()

    def prefetch(self, count: int) -> None:
        """Let the thread load until `count` batches are loaded and not taken yet."""
        if not self._is_ahead:
            return
        with self._changed:
            self._quota = count
            self._changed.notify_all()

    def take(self, *, wait: bool) -> Batch | BaseException | None:
        """Return the next batch, or what the iterator raised in its place; None after the last.

        Args:
          wait: whether to wait for the batch; if False, None also means that none is loaded yet.

        Raises:
          TimeoutError: the batch was not loaded in time; it can still be taken later.
        """
        if not self._is_ahead:
            item = self._next_item() if wait and self._is_loading else None
            self._is_loading &= item is not None
            return item
        with self._changed:
            is_over = lambda: self._items or not self._is_loading  # noqa: E731
            if wait and not self._changed.wait_for(is_over, self._timeout):
                raise TimeoutError(
                    f"`batches` gave none within `timeout`={self._timeout:g} s; the loader goes on."
                )
            if not self._items:
                return None
            self._quota -= 1  # the caller counts the batches that it has taken
            return self._items.popleft()

    def close(self, *, wait: bool = True) -> None:
        """Drop all batches and end the thread; wait at most a second for one being loaded."""
        with self._changed:
            self._is_closed, self._is_loading = True, False
            self._items.clear()
            self._changed.notify_all()
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(ENDING_SECONDS)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._quota)
            goes_on = not self._is_closed and self._load()

    def _next_item(self) -> Batch | BaseException | None:
        """Return a batch, or what is raised in its place; None at the end of `source`."""
        assert self.source is not None, "`set_source` comes before `open`"
        if self.num_left <= 0:
            return None
        try:
            item = self.clock(self.source.take, waits=self._is_ahead)
        except BaseException as error:  # raised by the call that needs this batch
            return error
        self.num_left -= item is not None
        self.clock.count -= item is None  # it counts batches
        return item

    def _load(self) -> bool:
        """Load a batch in the thread; return False at the end of `source`."""
        source, item = self.source, self._next_item()
        with self._changed:
            if item is not None and not self._is_closed:
                self._items.append(item)
            has_ended = item is None and source is self.source
            self._is_loading &= not has_ended
            self._changed.notify_all()
            return not has_ended


_RUNNING: "weakref.WeakSet[Loader]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Close all loaders: a thread inside a library while Python exits may abort the process."""
    for loader in list(_RUNNING):
        loader.close()
