"""What the host knows of its steps: counters, without asking the device for them."""

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._typing import PyTree
from ...transform import ParameterTransform
from .._state import TrainState


class Counted(NamedTuple):
    """What the counters of a state say.

    Attributes:
      updates: so far.
      skipped: those of them whose exchange did not take place, as `sync.phase` wants to know.
    """

    updates: int
    skipped: int


def counter_of(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    """Return the counter of the parameter transform, that of the steps without one."""
    return state.step if sync is None else state.opt_state[-1].count


def _counted(counter: Any, sync: ParameterTransform | None, state: PyTree) -> Counted:
    """From the device: the counter, and what the state of `sync` tells."""
    skipped = 0
    if sync is not None and sync.skipped is not None:
        skipped = int(sync.skipped(jax.tree.map(_of_one_replica, state)))
    return Counted(int(_of_one_replica(counter)), skipped)


def _of_one_replica(x: Any) -> Any:
    """A counter, equal on all replicas, as a NumPy scalar; other leaves as they are."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(local)[0]


class Room(NamedTuple):
    """How many batches more the rows of a window have room for.

    Attributes:
      num_batches: so many.
      share: structure, shapes and dtypes of what one device has of each of them.
    """

    num_batches: int
    share: Hashable


class HostCounts:
    """What counters hold, by the array that holds them.

    Reading one from the device waits for the step that computes it. Here each is read at most once,
    and the counters of later states follow from it. An entry belongs to one array and lives as
    long, so several states, in several threads too, do not take each other's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, array: Any) -> Any:
        """What belongs to `array`, None where it was neither read nor noted."""
        found = self._known.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def of(self, state: TrainState, sync: ParameterTransform | None) -> Counted:
        """Return the counts of a state; from the device where they are not known.

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
        known = self.get(counter)
        if known is None:
            known = _counted(counter, sync, state.opt_state[-1])
            self.note(counter, known)
        return known

    def note(self, array: Any, value: Counted | Room) -> None:
        """Take note of what is known without reading it."""
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), value
