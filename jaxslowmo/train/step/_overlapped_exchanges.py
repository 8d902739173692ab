"""The exchange of several updates as a program of its own, overlapped with the steps of CPU hosts.

jax's CPU client lets each program wait for the last one that the same thread dispatched (measured
with jax 0.10.2 and 0.12), so a second thread dispatches the exchange. Three rules keep it hidden,
and processes from waiting for each other:

- It reads a copy: a step that donates what an unfinished program reads waits for that program.
- A step receives only its finished result, for which the host waits.
- Its dispatch ends before the next step is dispatched, so all processes dispatch their collectives
  in one order.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import jax
import jax.numpy as jnp

from ..._support.types import AxisName, Phase, PyTree
from ...mesh import AnyMesh, axis_names, map_replicas
from ...transform import OverlappedExchange
from .._process_comparison import is_multi_process, process_indices
from .._train_state import TrainState
from ._programs import scalar_counter


def can_overlap(mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Return whether an exchange can overlap steps on this mesh: each process is a CPU replica.

    With more devices in a process or a replica, local steps hold collectives or share threads with
    those of the exchange. On GPUs and TPUs the programs of a device run one after the other.
    """
    return (
        is_multi_process(mesh)
        and _has_replica_per_device(mesh, axis_name)
        and len(process_indices(mesh)) == mesh.size
        and mesh.devices.flat[0].platform == "cpu"
    )


def _has_replica_per_device(mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Return whether each device of the mesh is a replica."""
    return set(mesh.shape) == set(axis_names(axis_name))


class OverlappedExchanges:
    """The exchanges of one runner's transform, of which each serves several updates.

    Where they can't overlap the steps, the steps' programs contain them. Then this only completes
    one in a restored state whose earlier updates have sent less than those programs expect.

    Args:
      spec: the overlapped part of the parameter transform.
      mesh: the step's mesh.
      axis_name: the replica axis, or several.
    """

    def __init__(self, spec: OverlappedExchange, mesh: AnyMesh, axis_name: AxisName) -> None:
        self._spec, self._mesh, self._axis_name = spec, mesh, axis_name
        self.overlaps = can_overlap(mesh, axis_name)
        # Results, finished or not, with the counters of the states whose updates they overlap,
        # and the events that they stand for.
        self._in_flight: list[tuple[weakref.ref[jax.Array], str, PyTree]] = []

    def phase(self, phase: Phase) -> Phase:
        """Return the phase of an update's program: without the events that overlap it."""
        sends = self._spec.sending_events(phase) if self.overlaps else ()
        return tuple(event for event in phase if event not in sends)

    def before_update(
        self, state: TrainState, phase: Phase, t: int, *, is_known: bool
    ) -> TrainState:
        """Return the state for the program of an update, with the result if it is due.

        Args:
          state: the state before the update.
          phase: the whole phase of the update.
          t: the number of the update, from 1.
          is_known: whether a step with the same runner made the state.

        Communication: that of the exchange, in its first update and in the first one that a run
          with a restored state makes.
        """
        local = state.exchange.local
        for event in self._spec.sending_events(phase):
            if not self.overlaps:
                state = state if is_known else self._complete_in_flight(state, event, t)
                continue
            result = self._find_result(state, event)
            if result is None:
                result = self._start_exchange(self._spec.values_to_send(local, event))
                self._remember(state, event, result)
            if self._spec.is_applied(phase, event):
                state = self._with_result(result, state, event)
        return state

    def after_update(self, old: TrainState, new: TrainState, phase: Phase) -> None:
        """Pass exchanges in flight to the state after the update."""
        for event in self._spec.sending_events(phase):
            result = self._find_result(old, event)
            if result is not None and not self._spec.is_applied(phase, event):
                self._remember(new, event, result)

    def _find_result(self, state: TrainState, event: str) -> PyTree | None:
        """Return the result of an exchange that overlaps the next update of a state, or None."""
        # Several states may have one in flight, if a user continues from a state twice.
        counter = state.step
        results = (x for ref, name, x in self._in_flight if ref() is counter and name == event)
        return next(results, None)

    def _remember(self, state: TrainState, event: str, result: PyTree) -> None:
        alive = [entry for entry in self._in_flight if entry[0]() is not None]
        self._in_flight = [*alive, (weakref.ref(state.step), event, result)]

    def _start_exchange(self, sent: PyTree) -> PyTree:
        """Start an exchange and return its result, which may not be finished."""
        return self._thread.submit(self._exchange, self._copy(sent)).result()

    def _with_result(self, result: PyTree, state: TrainState, event: str) -> TrainState:
        """Wait for the result of an exchange, and return the state with it."""
        jax.block_until_ready(result)
        local = self._spec.with_values(state.exchange.local, event, result)
        return state._replace(exchange=state.exchange._replace(local=local))

    def _complete_in_flight(self, state: TrainState, event: str, t: int) -> TrainState:
        """Send what a restored state has in flight, if update `t` expects more than was sent."""
        local = state.exchange.local
        is_behind = self._spec.is_behind(jax.tree.map(scalar_counter, local), event, t)
        if not is_behind or not _has_replica_per_device(self._mesh, self._axis_name):
            return state
        return self._with_result(
            self._exchange(self._spec.values_to_send(local, event)), state, event
        )

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="jaxslowmo-exchange")

    @cached_property
    def _copy(self) -> Callable[[PyTree], PyTree]:
        return jax.jit(lambda values: jax.tree.map(jnp.copy, values))

    @cached_property
    def _exchange(self) -> Callable[[PyTree], PyTree]:
        exchange, axis = self._spec.exchange, self._axis_name
        return jax.jit(
            map_replicas(exchange, mesh=self._mesh, axis_name=axis, in_roles=("stacked",))
        )
