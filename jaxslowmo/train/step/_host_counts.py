"""Values that the host knows of states whose arrays it does not read."""

import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from ...transform import ParameterTransform
from .._train_state import TrainState

Value = TypeVar("Value")


class UpdateCounts(NamedTuple):
    """The counters of a state.

    Attributes:
      updates: number of updates so far.
      skipped: number of these whose exchange did not take place, an argument of `sync.phase`.
    """

    updates: int
    skipped: int


def counter_of(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    """Return the counter of the parameter transform, or that of the steps if there is none."""
    return state.step if sync is None else state.opt_state[-1].count


def of_one_replica(x: Any) -> Any:
    """Return a counter, equal on all replicas, as a NumPy scalar; other leaves unchanged."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(local)[0]


# How many entries `ArrayNotes` holds before it looks for those of arrays that are gone.
_SMALLEST_ROOM = 64


class ArrayNotes(Generic[Value]):
    """Values that the host keeps of arrays that it does not read.

    An entry belongs to one array, so several states, also in several threads, do not get mixed up;
    entries of arrays that are gone are removed when there are many.

    Args:
      room: the number of entries from which on it looks for them.
    """

    def __init__(self, room: int = _SMALLEST_ROOM) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Value]] = {}
        self._room = self._smallest_room = room

    def get(self, array: Any) -> Value | None:
        """Return the value of `array`; None if none was noted."""
        entry = self._values.get(id(array))
        return entry[1] if entry is not None and entry[0]() is array else None

    def note(self, array: Any, value: Value) -> None:
        """Store the value of an array, in place of an earlier one."""
        if len(self._values) >= self._room:
            # Not by a callback of each reference: Python discards what is raised in one, so a
            # KeyboardInterrupt that arrived while it ran would be lost.
            alive = {k: v for k, v in list(self._values.items()) if v[0]() is not None}
            self._values, self._room = alive, max(2 * len(alive), self._smallest_room)
        self._values[id(array)] = weakref.ref(array), value


class HostCounts(ArrayNotes[UpdateCounts]):
    """The counters of states.

    Reading a counter from the device waits for the step that computes it. Here each is read at most
    once, and the counters of later states follow from it.
    """

    def of(self, state: TrainState, sync: ParameterTransform | None) -> UpdateCounts:
        """Return the counts of a state; read them from the device if they were not noted.

        Raises:
          ValueError: a traced state, whose counter has no value.
        """
        counter = counter_of(state, sync)
        if isinstance(counter, Tracer):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like: call it "
                'outside, or use mode="traced", whose one program decides by itself.'
            )
        counts = self.get(counter)
        if counts is None:
            skipped = 0
            if sync is not None and sync.skipped is not None:
                skipped = int(sync.skipped(jax.tree.map(of_one_replica, state.opt_state[-1])))
            counts = UpdateCounts(int(of_one_replica(counter)), skipped)
            self.note(counter, counts)
        return counts
