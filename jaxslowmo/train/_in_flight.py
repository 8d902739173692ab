"""How far the host may run ahead of CPU devices."""

from collections import deque

import jax
from jax.core import Tracer

from .._typing import PyTree

# The CPU client admits 32 unfinished programs per device and makes the launch of one more wait in
# the pool of threads that must run the others. With several devices in a process a program that
# exchanges something then lacks a thread for one of them, and all wait for ever (jax 0.10.2, 4
# devices on 2 cores: one run of 200 small steps in about 30).
MAX_STEPS = 8


class StepsInFlight:
    """Results of steps that were started and may not have ended, oldest first."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()

    def admit(self, results: PyTree) -> None:
        """Take note of a started step; on CPU, wait until at most `MAX_STEPS` are unfinished.

        Args:
          results: arrays of the step that nothing will donate.

        Communication: none.
        """
        array = next(iter(jax.tree.leaves(results)), None)
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            return
        if next(iter(array.devices())).platform != "cpu":
            return
        self._results.append(array)
        if len(self._results) > MAX_STEPS:
            jax.block_until_ready(self._results.popleft())
