"""Dispatch a schedule's operations in its order, and pass arrays between them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding

from ..._support.types import PyTree
from ..schedules import Operation, Schedule
from ._stage_programs import StageInputs, StagePrograms

# The number of ticks that may be dispatched and unfinished. The host must be ahead of the devices,
# so that they do not wait for it; but each tick ahead holds arrays beyond what the schedule needs.
_TICKS_AHEAD = 4

_ByStage = dict[tuple[int, int], PyTree]  # maps (stage of the model, microbatch) to arrays


@dataclass
class Pass:
    """One pass of all microbatches through the stages.

    This object holds the only references to intermediate arrays. It drops an array as soon as the
    last operation that needs it has been dispatched.

    Attributes:
      schedule: the order of the operations.
      programs: the programs of each stage of the model.
      data: the arguments that all operations of each stage of the model share.
      numbers: per device stage, the numbers of this pass's microbatches, on its devices.
      arrivals: per device stage, the sharding of activations that are sent to it.
      totals: per device stage, the sums of its gradients; changed by `run`.
      states: per device stage, the model state of its layers; changed by `run`.
      results: maps each microbatch to the result of the last stage.
    """

    schedule: Schedule
    programs: Sequence[StagePrograms]
    data: Sequence[StageInputs]
    numbers: Sequence[Sequence[jax.Array]]
    arrivals: Sequence[NamedSharding]
    totals: list[PyTree]
    states: list[PyTree]
    results: dict[int, PyTree] = field(default_factory=dict)
    _x: _ByStage = field(default_factory=dict)
    _stash: _ByStage = field(default_factory=dict)
    _dy: _ByStage = field(default_factory=dict)
    _kept: _ByStage = field(default_factory=dict)

    def run(self) -> None:
        """Dispatch all operations; return when the last ones are dispatched, not finished."""
        in_flight: deque[list[jax.Array]] = deque()
        for tick in self.schedule.ticks():
            if len(in_flight) == _TICKS_AHEAD:
                jax.block_until_ready(in_flight.popleft())
            outputs = [self._dispatch(operation) for cell in tick for operation in cell]
            in_flight.append([x for x in outputs if x is not None])

    def evaluate(self) -> None:
        """Dispatch only the forward passes."""
        for m in range(self.schedule.num_microbatches):
            if m >= _TICKS_AHEAD:
                jax.block_until_ready(self.results[m - _TICKS_AHEAD])
            for k in range(len(self.programs)):
                self._forward(k, m)
                self._stash.pop((k, m))

    def _dispatch(self, operation: Operation) -> jax.Array | None:
        """Dispatch one operation; return one of its outputs, to wait for."""
        k, m = self.schedule.model_stage(operation), operation.microbatch
        run = {
            "F": self._forward,
            "B": self._backward_input,
            "BW": self._backward,
            "W": self._backward_weight,
        }[operation.kind]
        return next(iter(jax.tree.leaves(run(k, m))), None)

    def _inputs(self, k: int, m: int) -> tuple[StageInputs, jax.Array]:
        return self.data[k], self.numbers[self.schedule.placement[k]][m]

    def _forward(self, k: int, m: int) -> PyTree:
        stage = self.schedule.placement[k]
        y, self._stash[k, m], self.states[stage] = self.programs[k].forward(
            *self._inputs(k, m), self._x.pop((k, m), None), self.states[stage]
        )
        if k + 1 < len(self.programs):
            self._x[k + 1, m] = self._send(y, k + 1)
        else:
            self.results[m] = y
        return y

    def _backward_input(self, k: int, m: int) -> PyTree:
        dx, self._kept[k, m] = self.programs[k].backward_input(
            *self._inputs(k, m), self._stash[k, m], self._dy.pop((k, m), None)
        )
        self._send_back(k, m, dx)
        return dx, self._kept[k, m]

    def _backward_weight(self, k: int, m: int) -> None:
        stage = self.schedule.placement[k]
        self.totals[stage] = self.programs[k].backward_weight(
            *self._inputs(k, m), self._stash.pop((k, m)), self._kept.pop((k, m)), self.totals[stage]
        )

    def _backward(self, k: int, m: int) -> PyTree:
        stage = self.schedule.placement[k]
        dx, self.totals[stage] = self.programs[k].backward(
            *self._inputs(k, m),
            self._stash.pop((k, m)),
            self._dy.pop((k, m), None),
            self.totals[stage],
        )
        self._send_back(k, m, dx)
        return dx

    def _send_back(self, k: int, m: int, dx: PyTree) -> None:
        if k:
            self._dy[k - 1, m] = self._send(dx, k - 1)

    def _send(self, tree: PyTree, k: int) -> PyTree:
        return jax.device_put(tree, self.arrivals[self.schedule.placement[k]])
