"""The same with peers over the internet, through `hivemind.Optimizer`, where it is installed."""

import importlib.util
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .outer_optimizer import adamw, warm_up_and_decay


def is_installed() -> bool:
    """Whether hivemind can be imported."""
    return importlib.util.find_spec("hivemind") is not None


class HivemindOptimizer:
    """AdamW once all peers together have `target_batch_size` samples, on their mean gradient.

    Start it before `TPUManager`: it forks processes of its own.

    Args:
      model: the master model, with the parameters to start from.
      learning_rate: the highest.
      total_steps: of the optimizer, for the schedule.
      target_batch_size: samples of all peers per step of the optimizer.
      run_id: names the training run; peers of the same name train together.
      initial_peers: addresses of peers to join, none to be the first.

    Raises:
      ImportError: without hivemind.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        total_steps: int,
        target_batch_size: int,
        run_id: str,
        initial_peers: list[str],
    ):
        import hivemind  # pyright: ignore[reportMissingImports]  optional

        self.model = model
        self.dht = hivemind.DHT(initial_peers=initial_peers, start=True)
        self.addresses = [str(address) for address in self.dht.get_visible_maddrs()]
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id=run_id,
            target_batch_size=target_batch_size,
            params=list(model.parameters()),
            optimizer=lambda parameters: adamw(parameters, learning_rate),
            scheduler=lambda optimizer: LambdaLR(optimizer, warm_up_and_decay(total_steps)),
        )

    @property
    def steps(self) -> int:
        """Steps of all peers together, also before this one joined."""
        return self.optimizer.local_epoch

    def after_step(self, num_samples: int) -> bool:
        """Hand over the gradients; hivemind keeps the sum itself, so they start again from zero."""
        before = self.steps
        self.optimizer.step(batch_size=num_samples)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return self.steps != before

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, which includes the number of steps; the schedule follows from it."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; peers that are further ahead send theirs instead."""
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Leave the peers."""
        self.optimizer.shutdown()
        self.dht.shutdown()
