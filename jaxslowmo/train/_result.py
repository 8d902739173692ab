"""What one step of the loop left."""

from dataclasses import dataclass, field
from typing import Any

import jax

from .._typing import Phase
from ._state import TrainState


@dataclass
class StepResult:
    """What one step left.

    Attributes:
      step: number of this step in the loop, from 1.
      state: the state after it. The next step donates its buffers: read it before going on.
      metrics: stacked per replica, on the devices; reading them waits for the step.
      phase: what was exchanged, `()` for a local step; see `js.phase_name`.
      reports: what hooks returned, merged in their order.
    """

    step: int
    state: TrainState
    metrics: dict[str, jax.Array]
    phase: Phase
    reports: dict[str, Any] = field(default_factory=dict)
