"""What the operations of stages cost, as the compiler counts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ._stages import Stage


class Cost(NamedTuple):
    """Of one compiled operation, on one device.

    Attributes:
      flops: floating-point operations.
      temp_bytes: memory for what is neither argument nor result.
    """

    flops: float = 0.0
    temp_bytes: int = 0


class StageCosts(NamedTuple):
    """Of the operations of one stage of the model."""

    forward: Cost
    backward_input: Cost = Cost()
    backward_weight: Cost = Cost()

    @property
    def temp_bytes(self) -> int:
        """Of the operation that takes most."""
        return max(cost.temp_bytes for cost in self)


def stage_costs(stages: Sequence[Stage], *, splits: bool, forward_only: bool) -> list[StageCosts]:
    """Costs of F, B and W of each stage of the model.

    Where a schedule does not split the backward pass, all of it counts as B.
    """
    count = _Compiler()
    costs = []
    for stage in stages:
        program = stage.program
        forward = count(program.forward, stage.weights, stage.x, stage.microbatch)
        given = stage.weights, stage.microbatch, program.stash
        if forward_only:
            costs.append(StageCosts(forward))
        elif splits:
            of_input = count(program.backward_input, *given, stage.cotangent)
            of_weights = count(program.backward_weight, *given, program.kept)
            costs.append(StageCosts(forward, of_input, of_weights))
        else:
            costs.append(StageCosts(forward, count(program.backward, *given, stage.cotangent)))
    return costs


class _Compiler:
    """Compiles operations, equal ones once."""

    def __init__(self) -> None:
        self._known: dict[str, Cost] = {}

    def __call__(self, fn: Callable[..., Any], *types: Any) -> Cost:
        lowered = jax.jit(fn).lower(*types)
        text = lowered.as_text()
        if text not in self._known:
            compiled = lowered.compile()
            found: Any = compiled.cost_analysis() or {}
            memory: Any = compiled.memory_analysis()
            self._known[text] = Cost(float(found.get("flops", 0.0)), int(memory.temp_size_in_bytes))
        return self._known[text]
