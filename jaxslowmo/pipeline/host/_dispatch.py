"""Dispatch of a schedule's operations, in its order, with what passes between them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._typing import PyTree
from ..schedules import Operation, Schedule
from ._programs import StagePrograms

# Ticks that may be under way: the host is ahead of the devices, so that they do not wait for it,
# and not by more, so that no more is held than the schedule promises and these ticks add.
_TICKS_AHEAD = 4

Feed = Callable[[int, int], tuple[list[jax.Array], Any]]
"""Of a stage of the model and a microbatch: the leaves that are read there, and the key."""


@dataclass
class Pass:
    """One pass of all microbatches through the stages.

    What an operation leaves is held here until the operation that needs it last has been
    dispatched, and nowhere else.

    Attributes:
      schedule: the order.
      programs: of each stage of the model.
      weights: of each stage of the model, stacked, on its devices.
      feed: microbatches.
      totals: of each stage of the model, where gradients are summed.
      results: of each microbatch, what the last stage gives.
    """

    schedule: Schedule
    programs: Sequence[StagePrograms]
    weights: Sequence[PyTree]
    feed: Feed
    totals: list[PyTree]
    results: dict[int, PyTree] = field(default_factory=dict)
    _data: dict[tuple[int, int], Any] = field(default_factory=dict)
    _x: dict[tuple[int, int], PyTree] = field(default_factory=dict)
    _stash: dict[tuple[int, int], PyTree] = field(default_factory=dict)
    _dy: dict[tuple[int, int], PyTree] = field(default_factory=dict)
    _kept: dict[tuple[int, int], PyTree] = field(default_factory=dict)

    def run(self) -> None:
        """Dispatch everything; returns once the last operations are under way."""
        under_way: deque[list[jax.Array]] = deque()
        for tick in self.schedule.ticks():
            if len(under_way) == _TICKS_AHEAD:
                jax.block_until_ready(under_way.popleft())
            made = [self._do(operation) for of_stage in tick for operation in of_stage]
            under_way.append([x for x in made if x is not None])

    def _do(self, operation: Operation) -> jax.Array | None:
        """Dispatch one operation; returns some array that is there when it is done."""
        k, m = self.schedule.model_stage(operation), operation.microbatch
        match operation.kind:
            case "F":
                made = self._forward(k, m)
            case "B":
                made = self._backward_input(k, m)
            case "BW":
                made = self._backward(k, m)
            case "W":
                made = self._backward_weight(k, m)
        return next(iter(jax.tree.leaves(made)), None)

    def _forward(self, k: int, m: int) -> PyTree:
        data = self._data[k, m] = self.feed(k, m)
        program = self.programs[k]
        y, self._stash[k, m] = program.forward(self.weights[k], self._x.pop((k, m), None), *data)
        if k + 1 < len(self.programs):
            self._x[k + 1, m] = jax.device_put(y, self.programs[k + 1].at.split)
        else:
            self.results[m] = y
        return y

    def _backward_input(self, k: int, m: int) -> PyTree:
        dy = self._dy.pop((k, m), None)
        dx, self._kept[k, m] = self.programs[k].backward_input(
            self.weights[k], *self._data[k, m], self._stash[k, m], dy
        )
        self._pass_back(k, m, dx)
        return dx, self._kept[k, m]

    def _backward_weight(self, k: int, m: int) -> None:
        self.totals[k] = self.programs[k].backward_weight(
            self.weights[k],
            *self._data.pop((k, m)),
            self._stash.pop((k, m)),
            self._kept.pop((k, m)),
            self.totals[k],
        )

    def _backward(self, k: int, m: int) -> PyTree:
        dx, self.totals[k] = self.programs[k].backward(
            self.weights[k],
            *self._data.pop((k, m)),
            self._stash.pop((k, m)),
            self._dy.pop((k, m), None),
            self.totals[k],
        )
        self._pass_back(k, m, dx)
        return dx

    def _pass_back(self, k: int, m: int, dx: PyTree) -> None:
        if k:
            self._dy[k - 1, m] = jax.device_put(dx, self.programs[k - 1].at.split)


def evaluate(
    programs: Sequence[StagePrograms], weights: Sequence[PyTree], feed: Feed, num_microbatches: int
) -> dict[int, PyTree]:
    """Forward passes alone: what the last stage gives, by microbatch."""
    results: dict[int, PyTree] = {}
    for m in range(num_microbatches):
        if m >= _TICKS_AHEAD:
            jax.block_until_ready(results[m - _TICKS_AHEAD])
        x = None
        for k, program in enumerate(programs):
            x = program.evaluate(weights[k], jax.device_put(x, program.at.split), *feed(k, m))
        results[m] = x
    return results
