"""What slow momentum reads from the optimizer."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from .._graphs import launch


class Groups:
    """The groups of an optimizer that hold parameters, at one moment.

    Attributes:
      params: all parameters, in the order of the groups.
      ends: where each group ends in the vector of all of them.

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
        """The learning rate of each group, 0 where a schedule that ends there falls below it.

        Raises:
          ValueError: one has none.
        """
        found = []
        for index, group in enumerate(self._groups):
            if "lr" not in group:
                raise ValueError(
                    f"`optimizer.param_groups[{index}]` must have a learning rate `lr`."
                )
            rate = group["lr"]
            if isinstance(rate, torch.Tensor) and rate.device.type == "xla":
                # Reading a value that is not there yet would launch it unordered.
                launch(device)
            found.append(max(float(rate), 0.0))
        return found
