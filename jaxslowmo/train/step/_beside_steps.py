"""The exchange of several updates as a program of its own, beside the steps of CPU hosts.

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
from .._batches import is_of_processes, processes_of
from .._train_state import TrainState
from ._states import of_one_replica


def runs_beside(mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Return whether an exchange can run beside steps on this mesh: each process is a CPU replica.

    With more devices in a process or a replica, local steps hold collectives or share threads with
    those of the exchange. On GPUs and TPUs the programs of a device run one after the other.
    """
    return (
        is_of_processes(mesh)
        and _holds_whole_replicas(mesh, axis_name)
        and len(processes_of(mesh)) == mesh.size
        and mesh.devices.flat[0].platform == "cpu"
    )


def _holds_whole_replicas(mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Return whether each device of the mesh is a replica."""
    return set(mesh.shape) == set(axis_names(axis_name))


class BesideSteps:
    """The exchanges of one runner's transform, of which each serves several updates.

    Where they can't run beside the steps, the steps' programs hold them. Then this only completes
    one in a restored state whose earlier updates have sent less than those programs expect.

    Args:
      spec: what runs beside the steps, of the parameter transform.
      mesh: the step's mesh.
      axis_name: the replica axis, or several.
    """

    def __init__(self, spec: OverlappedExchange, mesh: AnyMesh, axis_name: AxisName) -> None:
        self._spec, self._mesh, self._axis_name = spec, mesh, axis_name
        self.is_beside = runs_beside(mesh, axis_name)
        # Results, finished or not, with the counters of the states whose updates they run beside,
        # and the events that they stand for.
        self._under_way: list[tuple[weakref.ref[jax.Array], str, PyTree]] = []

    def phase(self, phase: Phase) -> Phase:
        """Return the phase of an update's program: without what runs beside it."""
        sends = self._spec.sending_events(phase) if self.is_beside else ()
        return tuple(event for event in phase if event not in sends)

    def before(self, state: TrainState, phase: Phase, t: int, *, is_known: bool) -> TrainState:
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
            if not self.is_beside:
                state = state if is_known else self._completed(state, event, t)
                continue
            result = self._result_for(state, event)
            if result is None:
                result = self._started(self._spec.values_to_send(local, event))
                self._note(state, event, result)
            if self._spec.is_applied(phase, event):
                state = self._with(result, state, event)
        return state

    def after(self, old: TrainState, new: TrainState, phase: Phase) -> None:
        """Hand on what is under way to the state after the update."""
        for event in self._spec.sending_events(phase):
            result = self._result_for(old, event)
            if result is not None and not self._spec.is_applied(phase, event):
                self._note(new, event, result)

    def _result_for(self, state: TrainState, event: str) -> PyTree | None:
        """Return the result of an exchange that runs beside the next update of a state."""
        # Several states may be under way, if a user goes on from one twice.
        counter = state.step
        found = (x for ref, name, x in self._under_way if ref() is counter and name == event)
        return next(found, None)

    def _note(self, state: TrainState, event: str, result: PyTree) -> None:
        alive = [entry for entry in self._under_way if entry[0]() is not None]
        self._under_way = [*alive, (weakref.ref(state.step), event, result)]

    def _started(self, sent: PyTree) -> PyTree:
        """Return the result of an exchange, which may not be there yet."""
        return self._thread.submit(self._exchange, self._copied(sent)).result()

    def _with(self, result: PyTree, state: TrainState, event: str) -> TrainState:
        """Wait for the result of an exchange, and return the state with it."""
        jax.block_until_ready(result)
        local = self._spec.with_values(state.exchange.local, event, result)
        return state._replace(exchange=state.exchange._replace(local=local))

    def _completed(self, state: TrainState, event: str, t: int) -> TrainState:
        """Send what a restored state has in flight, if update `t` expects more than was sent."""
        local = state.exchange.local
        is_behind = self._spec.is_behind(jax.tree.map(of_one_replica, local), event, t)
        if not is_behind or not _holds_whole_replicas(self._mesh, self._axis_name):
            return state
        return self._with(self._exchange(self._spec.values_to_send(local, event)), state, event)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="jaxslowmo-exchange")

    @cached_property
    def _copied(self) -> Callable[[PyTree], PyTree]:
        return jax.jit(lambda values: jax.tree.map(jnp.copy, values))

    @cached_property
    def _exchange(self) -> Callable[[PyTree], PyTree]:
        exchange, axis = self._spec.exchange, self._axis_name
        return jax.jit(
            map_replicas(exchange, mesh=self._mesh, axis_name=axis, in_roles=("stacked",))
        )
