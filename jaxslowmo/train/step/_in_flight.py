"""How many steps are unfinished at once on CPU, and steps in loops of one's own: `bounded`."""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from ..._support.types import PyTree
from ...transform import counters_in

# The CPU client admits 32 unfinished programs per device. The launch of one more waits in the pool
# of threads that must run the others. With several devices in a process, a program with an exchange
# then lacks a thread for one of them, and all wait for ever. Measured with jax 0.10.2, 4 devices on
# 2 cores: one run in about 30, of 200 small steps; most runs of 400 steps in a user's own loop,
# where the host has less to do.
MAX_STEPS = 8


class StepsInFlight:
    """The results of steps that were started and may not have ended, oldest first."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()
        self._can_hang: bool | None = None  # None before the first result

    def add(self, result: jax.Array) -> None:
        """Record a started step; wait until at most `MAX_STEPS` are unfinished, if they could hang.

        That is where the process runs the step on several CPU devices.

        Args:
          result: a result of the step that no later call donates.

        Communication: none.
        """
        if self._can_hang is False or isinstance(result, Tracer):
            return
        if self._can_hang is None:
            # One device runs its programs one after the other, on any thread.
            self._can_hang = _is_on_cpu(result) and len(result.addressable_shards) > 1
        self._results.append(result)
        if len(self._results) > MAX_STEPS:
            # A thread that waits is woken by the kernel, which costs half of a small step, so one
            # wait serves several steps. They end in their order.
            ended = [self._results.popleft() for _ in range(MAX_STEPS // 2)]
            jax.block_until_ready(ended[-1])


def bounded(step: Callable[..., Any]) -> "BoundedStep":
    """Wrap the step of your own loop: it cannot hang on CPU, and unequal counters are an error.

    jax starts a step and returns before it has ended, so a loop that reads no result runs ahead of
    its devices. On TPU and GPU that keeps them busy. Several CPU devices of one process share its
    threads: if too many unfinished steps wait for a thread, none is left for an exchange between
    the devices, and the process hangs until XLA aborts it after 40 s. Therefore every eighth call
    on CPU waits for its own results, which no later call can have donated yet:

        step = js.bounded(jax.jit(device_step, donate_argnums=0))
        for batch in batches:
            state = step(state, batch)

    Each replica counts its updates and exchanges when its counter says so. If the loop lets one
    counter fall behind, for example by keeping that replica's old optimizer state where a gradient
    is not finite, the others wait for it in their next exchange for ever. Therefore every eighth
    call, on all platforms, compares the counters in its results between the replicas. On TPU and
    GPU this makes the host wait for that call, so that the devices are idle until the next one
    starts. In results over the devices of all processes, as of `jax.shard_map`, all replicas are
    compared; `jax.pmap` returns to each process its own replicas, and these alone are compared.

    A step of `js.make_train_step` needs no `bounded`.

    Args:
      step: a function that returns at least one array, made by `jax.jit`, `jax.pmap` or the like.

    Returns:
      A function with the arguments and attributes of `step` (`lower`, `trace`, ...), so
      `js.comm_report` and `js.reports.measured` take it. Inside of a trace it only calls `step`. So
      it does on TPU and GPU if the results hold no state of a transform of this library.

    Raises:
      ValueError: `step` cannot be called; by a call, counters that differ between replicas.

    Communication: the step's; one gather of 16 bytes per counter in every eighth call whose
      results hold counters over the devices of all processes.
    """
    return BoundedStep(step, compares=True)


class BoundedStep:
    """A step that looks at every eighth of its results; made by `bounded`.

    On CPU it waits for them.

    Args:
      step: the step.
      compares: whether every eighth call compares the counters of the replicas.
    """

    def __init__(self, step: Callable[..., Any], *, compares: bool = False) -> None:
        if not callable(step):
            raise ValueError(f"bounded: `step` must be a function, got {type(step).__name__}.")
        self._step: Any = step
        self._compares = compares
        self._calls = 0
        functools.update_wrapper(self, step, updated=())

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind the object as a method does, so that `bounded` can decorate methods."""
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step; on CPU at most `MAX_STEPS` are unfinished when it returns."""
        results = self._step(*args, **kwargs)
        arrays = _arrays(results)
        if arrays:
            self._calls += 1
            if self._calls % MAX_STEPS == 0:
                if _is_on_cpu(arrays[0]):
                    jax.block_until_ready(arrays)
                if self._compares:
                    _compare_counters(results, self._calls)
        return results


def _arrays(results: PyTree) -> list[jax.Array]:
    """Return the arrays in `results` that are not deleted; none while they are traced."""
    arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
    if any(isinstance(x, Tracer) for x in arrays):
        return []
    return [x for x in arrays if not x.is_deleted()]


def _is_on_cpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def _compare_counters(results: PyTree, calls: int) -> None:
    """Raise `ValueError` if a counter in `results` differs between replicas."""
    counters = counters_in(results)
    if not counters:
        return
    ends = [[min(_values_by_replica(x)), max(_values_by_replica(x))] for _, x in counters]
    both = np.array(ends, np.int32)  # (counters, 2, 2): least and largest, as value and replica
    # A step over the devices of all processes is called by all of them, equally often.
    processes = {d.process_index for _, x in counters for d in x.sharding.device_set}
    if 1 < len(processes) == jax.process_count():
        both = multihost_utils.process_allgather(both)
    for n, (name, _) in enumerate(counters):
        values = both.reshape(-1, len(counters), 2, 2)[:, n]
        least, replica = values[values[:, 0, 0].argmin(), 0]
        most, its = values[values[:, 1, 0].argmax(), 1]
        if least != most:
            raise ValueError(
                f"bounded: after {calls} calls {name} has counted {least} updates on replica "
                f"{replica} and {most} on replica {its}: see docs/before-you-move-pmean.md."
            )


def _values_by_replica(count: jax.Array) -> Iterator[tuple[int, int]]:
    """Yield the values that this process holds of a counter, each with its replica's number."""
    for number, shard in enumerate(count.addressable_shards):
        first = shard.index[0].start or 0 if count.ndim else number  # not stacked: one per device
        for i, value in enumerate(np.ravel(jax.device_get(shard.data))):
            yield int(value), first + i
