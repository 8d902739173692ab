"""One iterator, of which several threads may take batches."""

import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from ..._typing import PyTree
from ._changed import Sample, sample_of

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
