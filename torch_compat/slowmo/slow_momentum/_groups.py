"""The parameters and learning rates that slow momentum reads from the optimizer."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from .._graphs import launch


class Groups:
    """The groups of an optimizer that hold parameters, at the time of construction.

    Attributes:
      params: all parameters, in the order of the groups.
      ends: end of each group in the vector of all parameters.

    Raises:
      ValueError: no optimizer, or one without parameters.
    """

    def __init__(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, Iterable) or not any(group["params"] for group in groups):
            raise ValueError(
                f"`optimizer` must be a torch optimizer that holds parameters, got {optimizer!r}."
            )
        self._groups = [group for group in groups if group["params"]]
        self.params: list[torch.Tensor] = [p for group in self._groups for p in group["params"]]
        sizes = [sum(p.numel() for p in group["params"]) for group in self._groups]
        self.ends = tuple(accumulate(sizes))

    def rates(self, device: torch.device) -> list[float]:
        """Return the learning rate of each group; a negative one, at the end of a schedule, as 0.

        Raises:
          ValueError: a group has no learning rate.
        """
        rates = []
        for index, group in enumerate(self._groups):
            if "lr" not in group:
                raise ValueError(
                    f"`optimizer.param_groups[{index}]` must have a learning rate `lr`."
                )
            rate = group["lr"]
            if isinstance(rate, torch.Tensor) and rate.device.type == "xla":
                # Reading a pending value would launch its graph in no fixed order.
                launch(device)
            rates.append(max(float(rate), 0.0))
        return rates
