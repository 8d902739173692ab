"""What slow momentum reads from an optimizer."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch

from ._collectives import own_graph


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups that hold parameters.

    Raises:
      ValueError: no optimizer, or one without parameters.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, Iterable) or not any(group["params"] for group in groups):
        raise ValueError(
            f"`optimizer` must be a torch optimizer that holds parameters, got {optimizer!r}."
        )
    return [dict(group, params=list(group["params"])) for group in groups if group["params"]]


def ends_of(groups: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Where each group ends in the vector of all parameters."""
    return tuple(accumulate(sum(p.numel() for p in group["params"]) for group in groups))


def rate_of(group: Mapping[str, Any], index: int, device: torch.device) -> float:
    """The learning rate of a group, its `index`-th.

    Raises:
      ValueError: it has none.
    """
    if "lr" not in group:
        raise ValueError(f"`optimizer.param_groups[{index}]` must have a learning rate `lr`.")
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type == "xla":
        with own_graph(device):  # reading a value that is not there yet would launch it unordered
            pass
    return float(rate)
