"""AdamW on the host, for the mean gradients of the devices."""

import argparse
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def warm_up_and_decay(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """Return the schedule: linear up in a tenth of the steps, then linear down to a tenth."""
    rising, total = max(1, total_steps // 10), total_steps
    return LambdaLR(optimizer, lambda step: min((step + 1) / rising, max(0.1, 1 - step / total)))


class LocalOptimizer:
    """AdamW on the mean gradient of every --accumulation-steps steps of the devices."""

    def __init__(self, model: nn.Module, options: argparse.Namespace):
        self.parameters, self.period = list(model.parameters()), options.accumulation_steps
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.scheduler = warm_up_and_decay(self.optimizer, options.steps)
        self.steps = self.accumulated = 0

    def after_step(self) -> bool:
        """Take the gradients of a step; return whether the parameters have changed."""
        self.accumulated += 1
        if self.accumulated < self.period:
            return False
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.accumulated)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.steps, self.accumulated = self.steps + 1, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; call it right after a step."""
        optimizer, scheduler = self.optimizer.state_dict(), self.scheduler.state_dict()
        return {"optimizer": optimizer, "scheduler": scheduler, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]
