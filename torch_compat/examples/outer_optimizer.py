"""AdamW on the host, for the mean gradients of the devices: alone, or with peers."""

import argparse
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def warm_up_and_decay(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """Return the schedule: linear up in a tenth of the steps, then linear down to a tenth."""
    rising, total = max(1, total_steps // 10), total_steps
    return LambdaLR(optimizer, lambda step: min((step + 1) / rising, max(0.1, 1 - step / total)))


class LocalOptimizer:
    """AdamW on the mean gradient of every --accumulation-steps steps of the devices."""

    def __init__(self, model: nn.Module, options: argparse.Namespace):
        self.parameters, self.period = list(model.parameters()), options.accumulation_steps
        self.optimizer = adamw(self.parameters, options.learning_rate)
        self.scheduler = warm_up_and_decay(self.optimizer, options.steps)
        self.steps = self.accumulated = 0

    def after_step(self, num_samples: int) -> bool:
        """Take the gradients of `num_samples`; return whether the parameters have changed."""
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

    def close(self) -> None:
        """Do nothing: this optimizer has no connections to other processes."""


def hivemind_is_installed() -> bool:
    """Return whether hivemind can be imported."""
    return importlib.util.find_spec("hivemind") is not None


class HivemindOptimizer:
    """AdamW on the mean gradient of --target-batch-size samples of all peers, by hivemind.

    It has the methods of `LocalOptimizer`. Start it before `TPUManager`: it forks processes.
    """

    def __init__(self, model: nn.Module, options: argparse.Namespace):
        import hivemind  # pyright: ignore[reportMissingImports]  optional

        self.parameters = list(model.parameters())
        self.dht = hivemind.DHT(initial_peers=options.initial_peers, start=True)
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id=options.run_id,
            target_batch_size=options.target_batch_size,
            params=self.parameters,
            optimizer=lambda parameters: adamw(parameters, options.learning_rate),
            scheduler=lambda optimizer: warm_up_and_decay(optimizer, options.steps),
        )
        # The state holds the number of steps, which determines the schedule; peers that are further
        # ahead send their state.
        self.state_dict = self.optimizer.state_dict
        self.load_state_dict = self.optimizer.load_state_dict
        print("Others join with --initial-peers", *self.dht.get_visible_maddrs())

    @property
    def steps(self) -> int:
        """The steps of all peers together, including those before this one joined."""
        return self.optimizer.local_epoch

    def after_step(self, num_samples: int) -> bool:
        """Pass on the gradients and zero them; hivemind keeps its own sum."""
        previous = self.steps
        self.optimizer.step(batch_size=num_samples)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        return self.steps != previous

    def close(self) -> None:
        """Leave the peers."""
        self.optimizer.shutdown()
        self.dht.shutdown()


KINDS = {"local": LocalOptimizer, "hivemind": HivemindOptimizer}
