"""Counters of train states, known on the host without asking the device at every step."""

import weakref
from typing import Any

import jax
import numpy as np


class HostCounts:
    """What counters hold, by the array that holds them.

    Reading one from the device waits for the step that computes it. Here each is read at most once,
    and the counters of later states follow from it. An entry belongs to one array and lives as
    long, so several states, in several threads too, do not take each other's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def get(self, array: Any) -> int | None:
        """The value of `array`, None where it was neither read nor noted."""
        holder, value = self._known.get(id(array), (None, 0))
        return value if holder is not None and holder() is array else None

    def read(self, array: Any) -> int:
        """The value of `array`, equal on all replicas; from the device where it is not known."""
        known = self.get(array)
        if known is not None:
            return known
        local = array.addressable_data(0) if isinstance(array, jax.Array) else array
        value = int(np.asarray(local).reshape(-1)[0])
        self.note(array, value)
        return value

    def note(self, array: Any, value: int) -> None:
        """Take note of a value that is known without reading it."""
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), value
