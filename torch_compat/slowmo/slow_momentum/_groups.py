"""The parameters that optimizers hold, by name, and their learning rates."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._graphs import launch


class Groups:
    """The groups of one or several optimizers that hold parameters, when this is made.

    Args:
      optimizers: an optimizer, or a sequence of optimizers.
      held: maps the id of a tensor that an optimizer may hold, a parameter or its float32 master,
        to the names of the module's parameters that it stands for.
      order: names of the parameters to find, in the module's order.

    Attributes:
      optimizers: the optimizers.
      names: names of the parameters that they hold, in the module's order.
      twice: the first of these names that is held twice; None if there is none.
      foreign: number of tensors they hold that stand for no parameter of the module.

    Raises:
      ValueError: no optimizer, or one without parameters.
    """

    def __init__(self, optimizers: Any, held: Mapping[int, Sequence[str]], order: Iterable[str]):
        self.optimizers = as_list(optimizers)
        self._group_of: dict[str, dict[str, Any]] = {}
        self.foreign, self.twice, order = 0, None, dict.fromkeys(order)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    names = held.get(id(tensor), ())
                    self.foreign += not names
                    for name in names:
                        if name in self._group_of and name in order:
                            self.twice = self.twice or name
                        self._group_of[name] = group
        self.names = tuple(name for name in order if name in self._group_of)

    @property
    def are_one(self) -> bool:
        """True if all parameters are in one group."""
        return len({id(self._group_of[name]) for name in self.names}) == 1

    def rates(self, device: torch.device) -> list[float]:
        """Return the learning rate of each name; a negative one, at the end of a schedule, as 0.

        Raises:
          ValueError: a group has no learning rate.
        """
        of_group: dict[int, float] = {}
        for name in self.names:
            group = self._group_of[name]
            if id(group) not in of_group:
                of_group[id(group)] = _rate(group, name, device)
        return [of_group[id(self._group_of[name])] for name in self.names]


def as_list(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list.

    Raises:
      ValueError: one of them is no optimizer, or holds no parameters.
    """
    several = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in several or [optimizers]:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, Iterable) or not any(group["params"] for group in groups):
            raise ValueError(
                "`optimizer` must be a torch optimizer that holds parameters, or a list of them, "
                f"got {optimizer!r}."
            )
    return several


def _rate(group: Mapping[str, Any], name: str, device: torch.device) -> float:
    rate = group.get("lr")
    if rate is None:
        raise ValueError(
            "`optimizer` must have a learning rate `lr` in each group under slow momentum, which "
            f"divides by it; the group of {name!r} has {rate!r}. Give the optimizer one (Adafactor "
            "with relative_step=False), or set slowmo_momentum=0 and slowmo_lr=1."
        )
    if isinstance(rate, torch.Tensor) and rate.device.type == "xla":
        launch(device)  # reading a pending value would launch its graph in no fixed order
    return max(float(rate), 0.0)
