"""The phases of a step's updates, and what the host knows of its states to tell them."""

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..._support.types import Phase, PyTree
from ...transform import ParameterTransform, phase_name
from .._train_state import ReplicaState, TrainState
from ._states import scalar_counter

Mode = Literal["traced", "host"]

_State = TypeVar("_State", TrainState, ReplicaState)
_Result = TypeVar("_Result")

_NUM_RECENT = 16  # arrays: one a state or window, of which few are in use at a time


class UpdateCounts(NamedTuple):
    """The counters of a state.

    Attributes:
      updates: number of updates so far.
      skipped: number of these whose exchange did not take place, an argument of `sync.phase`.
    """

    updates: int
    skipped: int


class RecentValues:
    """Facts that the host knows of the last few arrays on devices, such as a counter's value.

    Reading a counter from the device waits for the step that computes it. Here each is read at most
    once, and the counters of later states follow from it. An entry belongs to its array, so several
    states, also in several threads, do not get mixed up.
    """

    def __init__(self) -> None:
        self._entries: tuple[tuple[weakref.ref[Any], Any], ...] = ()

    def get(self, array: Any) -> Any:
        """Return the value of the array; None if none was set, or those of many others since."""
        for ref, value in self._entries:
            if ref() is array:
                return value
        return None

    def set(self, value: Any, array: Any) -> None:
        """Remember `value` of the array."""
        self._entries = (weakref.ref(array), value), *self._entries[: _NUM_RECENT - 1]


class Phases:
    """The phases of a step's updates, by the counters of its states.

    Args:
      sync: the step's parameter transform; None: nothing is exchanged.
      mode: `"traced"`: programs decide which exchanges are due. `"host"`: each is of one phase.

    Attributes:
      sync: that transform, which the step replaces when it knows its parameters.
    """

    def __init__(self, sync: ParameterTransform | None, mode: Mode) -> None:
        self.sync, self._mode, self._counts = sync, mode, RecentValues()

    def at_update(self, t: int) -> Phase:
        """Return the phase of update t = 1, 2, ... if no exchange is skipped."""
        return () if self.sync is None else self.sync.phase(t)

    def next(self, state: TrainState | ReplicaState, later: int = 0) -> Phase:
        """Return the phase of an update that is `later` updates after the next one."""
        counts = self.update_counts(state)
        if self.sync is None:
            return ()
        return self.sync.algorithm.phase(counts.updates + 1 + later, counts.skipped)

    def program_phase(self, state: TrainState | ReplicaState, later: int = 0) -> Phase | None:
        """Return the phase for which an update's program is made; None if it decides itself."""
        return self.next(state, later) if self._mode == "host" else None

    def trace_by_phase(self, trace: Callable[[Phase | None], _Result]) -> dict[str | None, _Result]:
        """Return what a function returns of each program's phase, by the phase's name."""
        if self._mode == "traced":
            return {None: trace(None)}
        if self.sync is None:
            return {"every": trace(())}
        return {phase_name(phase): trace(phase) for phase in self.sync.phases()}

    def scan(
        self,
        state: _State,
        batches: PyTree,
        length: int,
        run: Callable[[Phase | None, _State, PyTree], tuple[_State, PyTree]],
    ) -> tuple[_State, PyTree]:
        """Run an update for each of several batches, those of one phase in a row by one program.

        Args:
          state: the state before the first update.
          batches: arrays with a first dimension of `length`.
          length: number of updates.
          run: `run(phase, state, batches)`: runs the program of several updates.

        Returns:
          The last state, and the results of `run`, concatenated along their first dimension.
        """
        phases, first = [self.program_phase(state, i) for i in range(length)], state
        outputs, start = [], 0
        for phase, same in itertools.groupby(phases):
            stop = start + len([*same])
            part = batches
            if stop - start < length:
                rows = partial(lax.slice_in_dim, start_index=start, limit_index=stop)
                part = jax.tree.map(rows, batches)  # no index is copied to the devices
            state, results = run(phase, state, part)
            outputs.append(results)
            start = stop
        self.advance(first, state, length)
        return state, outputs[0] if len(outputs) == 1 else concatenate_results(outputs)

    def update_counts(self, state: TrainState | ReplicaState) -> UpdateCounts:
        """Return the counts of a state; read them from the device if they are unknown."""
        counter = state.step
        counts = self._counts.get(counter)
        if counts is not None:
            return counts
        if isinstance(counter, Tracer | jax.ShapeDtypeStruct):
            raise ValueError(
                '`next_phase`, and with it every step with `mode`="host", reads the counter in '
                "`state`, which has no value inside of jax.jit, lax.scan and the like, nor as a "
                'shape: call it outside with arrays, or use mode="traced", whose one program '
                "decides by itself."
            )
        updates, skipped = int(scalar_counter(counter)), 0
        if self.sync is not None:
            local = jax.tree.map(scalar_counter, state.exchange.local)
            skipped = int(self.sync.algorithm.skip_count(local, updates))
        counts = UpdateCounts(updates, skipped)
        self._counts.set(counts, counter)
        return counts

    def advance(self, old: _State, new: _State, updates: int = 1) -> None:
        """Count updates between two states on the host, if those before are known."""
        counts = self._counts.get(old.step)
        if counts is not None:
            self._counts.set(counts._replace(updates=counts.updates + updates), new.step)


@jax.jit
def concatenate_results(results: list[PyTree]) -> PyTree:
    """Return the results of several runs of updates as one."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *results)
