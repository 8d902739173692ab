"""How many steps may run at once on CPU: of `make_train_step`, and of loops of one's own."""

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from ..._support.types import PyTree

# The CPU client admits 32 unfinished programs per device and makes the launch of one more wait in
# the pool of threads that must run the others. With several devices in a process a program that
# exchanges something then lacks a thread for one of them, and all wait for ever (jax 0.10.2, 4
# devices on 2 cores: one run of 200 small steps in about 30; in a loop of one's own, which gives
# the host less to do, most runs of 400).
MAX_STEPS = 8


class StepsInFlight:
    """Results of steps that were started and may not have ended, oldest first."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()
        self._is_on_cpu: bool | None = None  # not known before the first

    def admit(self, result: jax.Array) -> None:
        """Take note of a started step; on CPU, wait until at most `MAX_STEPS` are unfinished.

        Args:
          result: an array of the step that nothing will donate.

        Communication: none.
        """
        if self._is_on_cpu is False or isinstance(result, Tracer):
            return
        if self._is_on_cpu is None:
            self._is_on_cpu = bool(_on_cpu(result))
            self.admit(result)
            return
        self._results.append(result)
        if len(self._results) > MAX_STEPS:
            jax.block_until_ready(self._results.popleft())


def bounded(step: Callable[..., Any]) -> "BoundedStep":
    """A step for a loop of your own, of which few are unfinished at once on CPU devices.

    jax starts a step and returns before it has ended, so a loop that reads no result runs ahead of
    its devices. On TPU and GPU that keeps them busy. Several CPU devices of one process share its
    threads: where too many unfinished steps wait for one, none is left for an exchange between the
    devices, and the process hangs until XLA aborts it after 40 s. Here every eighth call on CPU
    waits for its own results, which no later call can have donated yet:

        step = js.bounded(jax.jit(device_step, donate_argnums=0))
        for batch in batches:
            state = step(state, batch)

    A step of `js.make_train_step` bounds itself.

    Args:
      step: a function that returns at least one array, made by `jax.jit`, `jax.pmap` or the like.

    Returns:
      A function that is called as `step` is and has its attributes (`lower`, `trace`, ...), so
      `js.comm_report` and `js.measured` take it. On other devices, and inside of a trace, it only
      calls `step`.

    Raises:
      ValueError: `step` cannot be called.

    Communication: the step's.
    """
    return BoundedStep(step)


class BoundedStep:
    """A step that waits for every eighth of its results on CPU; made by `bounded`."""

    def __init__(self, step: Callable[..., Any]) -> None:
        if not callable(step):
            raise ValueError(f"bounded: `step` must be a function, got {type(step).__name__}.")
        self._step: Any = step
        self._unfinished = 0
        functools.update_wrapper(self, step, updated=())

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """As a method: functions that are decorated in a class are given the object."""
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step; on CPU at most `MAX_STEPS` are unfinished when it returns."""
        results = self._step(*args, **kwargs)
        arrays = _on_cpu(results)
        if arrays:
            self._unfinished += 1
            if self._unfinished == MAX_STEPS:
                jax.block_until_ready(arrays)
                self._unfinished = 0
        return results


def _on_cpu(results: PyTree) -> list[jax.Array]:
    """Arrays that a step left on CPU devices; none while it is traced.

    The first array tells for all: a program runs on devices of one kind.
    """
    found = []
    for x in jax.tree.leaves(results):
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_deleted():
            continue
        if not found and next(iter(x.devices())).platform != "cpu":
            return []
        found.append(x)
    return found
