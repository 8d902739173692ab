"""What the host knows of its steps: counters, without asking the device for them."""

import weakref
from collections.abc import Callable
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
    """Return the counter of the updates in a state, (replicas,)."""
    return state.step if sync is None else state.opt_state[-1].count


def counted(counter: Any, sync: ParameterTransform | None, state: PyTree) -> Counted:
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


class HostCounts:
    """What counters hold, by the array that holds them.

    Reading one from the device waits for the step that computes it. Here each is read at most once,
    and the counters of later states follow from it. An entry belongs to one array and lives as
    long, so several states, in several threads too, do not take each other's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Counted]] = {}

    def get(self, array: Any) -> Counted | None:
        """What belongs to `array`, None where it was neither read nor noted."""
        found = self._known.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def read(self, array: Any, from_device: Callable[[], Counted]) -> Counted:
        """What belongs to `array`; from the device where it is not known.

        Raises:
          ValueError: it is traced.
        """
        if isinstance(array, Tracer):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like: call it "
                'outside, or use mode="traced", whose one program decides by itself.'
            )
        known = self.get(array)
        if known is None:
            known = from_device()
            self.note(array, known)
        return known

    def note(self, array: Any, value: Counted) -> None:
        """Take note of what is known without reading it."""
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), value
