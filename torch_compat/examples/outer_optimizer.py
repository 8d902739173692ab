"""What happens on the host to the gradients that the devices leave there."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

MAX_NORM = 1.0


class OuterOptimizer(Protocol):
    """Turns gradients on the host into new parameters, now and then."""

    @property
    def steps(self) -> int:
        """How often the parameters have changed."""
        ...

    def after_step(self, num_samples: int) -> bool:
        """Take the gradients of `num_samples`; whether the parameters have changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        ...

    def close(self) -> None:
        """Release what belongs to other processes."""
        ...


def adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with weight decay."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def warm_up_and_decay(total_steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear up in a tenth of the steps, then a cosine to a tenth."""
    rising = max(1, total_steps // 10)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, total_steps - rising))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return factor


class LocalOptimizer:
    """AdamW in this process, once for every `accumulation_steps` steps of the devices.

    Args:
      model: the master model; its gradients are sums over the accumulated steps.
      learning_rate: the highest.
      total_steps: of the optimizer, for the schedule.
      accumulation_steps: steps of the devices per step of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        total_steps: int,
        accumulation_steps: int,
    ):
        self.model, self.accumulation_steps = model, accumulation_steps
        self.optimizer = adamw(model.parameters(), learning_rate)
        self.scheduler = LambdaLR(self.optimizer, warm_up_and_decay(total_steps))
        self.steps = self.accumulated = 0

    def after_step(self, num_samples: int) -> bool:
        """Step the optimizer once there are gradients enough."""
        self.accumulated += 1
        if self.accumulated < self.accumulation_steps:
            return False
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.accumulated)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.steps, self.accumulated = self.steps + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """To be asked for right after the optimizer's step, when no gradients are waiting."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]

    def close(self) -> None:
        """Nothing to do."""
