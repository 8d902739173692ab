"""Dispatch of a schedule's operations, in its order, with what passes between them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding

from ..._support.types import PyTree
from ..schedules import Operation, Schedule
from ._stage_programs import StageInputs, StagePrograms

# Ticks that may be under way: the host is ahead of the devices, so that they do not wait for it,
# and not by more, so that no more is held than the schedule promises and these ticks add.
_TICKS_AHEAD = 4

_ByStage = dict[tuple[int, int], PyTree]  # by stage of the model and microbatch


@dataclass
class Pass:
    """One pass of all microbatches through the stages.

    What an operation leaves is held here until the operation that needs it last has been
    dispatched, and nowhere else.

    Attributes:
      schedule: the order of the operations.
      programs: those of each stage of the model.
      data: for each stage of the model what all of its operations are given.
      numbers: for each device stage the numbers of the microbatches of this pass, on its devices.
      arrivals: for each device stage where activations lie that have arrived there.
      totals: for each device stage the sums of its gradients; changed by `run`.
      states: for each device stage the model state of its layers; changed by `run`.
      results: what the last stage returns of each microbatch.
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
        """Dispatch everything; returns once the last operations are under way."""
        under_way: deque[list[jax.Array]] = deque()
        for tick in self.schedule.ticks():
            if len(under_way) == _TICKS_AHEAD:
                jax.block_until_ready(under_way.popleft())
            made = [self._do(operation) for of_stage in tick for operation in of_stage]
            under_way.append([x for x in made if x is not None])

    def evaluate(self) -> None:
        """Dispatch forward passes alone."""
        for m in range(self.schedule.num_microbatches):
            if m >= _TICKS_AHEAD:
                jax.block_until_ready(self.results[m - _TICKS_AHEAD])
            for k in range(len(self.programs)):
                self._forward(k, m)
                self._stash.pop((k, m))

    def _do(self, operation: Operation) -> jax.Array | None:
        """Dispatch one operation; return an array that is there when it is done."""
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
            self._x[k + 1, m] = self._sent(y, k + 1)
        else:
            self.results[m] = y
        return y

    def _backward_input(self, k: int, m: int) -> PyTree:
        dx, self._kept[k, m] = self.programs[k].backward_input(
            *self._inputs(k, m), self._stash[k, m], self._dy.pop((k, m), None)
        )
        self._pass_back(k, m, dx)
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
        self._pass_back(k, m, dx)
        return dx

    def _pass_back(self, k: int, m: int, dx: PyTree) -> None:
        if k:
            self._dy[k - 1, m] = self._sent(dx, k - 1)

    def _sent(self, tree: PyTree, k: int) -> PyTree:
        return jax.device_put(tree, self.arrivals[self.schedule.placement[k]])
