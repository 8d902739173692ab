"""Attributes of FairScale's class that scripts read."""

import torch

from .._replica import Replica


class NamesOfFairScale(torch.nn.Module):
    """The attributes of FairScale's class, read from the wrapper's replica."""

    _replica: Replica

    @property
    def gossip_enable(self) -> bool:
        """True in training mode: only then SGP exchanges."""
        return self.training

    @property
    def num_updates(self) -> int:
        """The number of calls of `perform_slowmo` so far."""
        return self._replica.collectives.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._replica.collectives.num_updates = number

    @property
    def ps_weight(self) -> torch.Tensor:
        """The push-sum weight w, (1,) float32."""
        return self._replica.push_sum.weight

    @ps_weight.setter
    def ps_weight(self, weight: torch.Tensor) -> None:
        self._replica.push_sum.weight = weight

    @property
    def is_sgp_ps_numerator(self) -> bool:
        """True if the module holds x rather than x / w."""
        return self._replica.push_sum.is_numerator

    @property
    def global_momentum_buffers_initialized(self) -> bool:
        """True if there is an anchor."""
        return self._replica.slow.momentum is not None

    @property
    def old_params(self) -> torch.Tensor | None:
        """This process' part of the anchor, (shard,) float32."""
        momentum = self._replica.slow.momentum
        return None if momentum is None else momentum.anchor

    @property
    def global_momentum_buffer(self) -> torch.Tensor | None:
        """This process' part of m, (shard,) float32; v where the learning rate was 0."""
        momentum = self._replica.slow.momentum
        return None if momentum is None else momentum.momentum_buffer()
