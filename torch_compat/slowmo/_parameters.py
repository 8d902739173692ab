"""The parameters that one call updates, their float32 masters, and their optimizers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._flat import flatten, unflatten
from ._graphs import Writes, launch

HALF = (torch.float16, torch.bfloat16)


class Masters:
    """The float32 copies of the module's parameters, in the forms `perform_slowmo` accepts.

    The exchange runs on the half-precision parameters. The difference to the master (the residual)
    stays in this process and is added to the average: error feedback.

    Args:
      sizes: number of elements of each parameter of the module, by name, in its order.
      fewer: sets of names, of which masters may leave out all others.
      fp32_params: one float32 vector of all parameters in their order, or a list with a float32
        tensor for each, or a dict with one such value.

    Attributes:
      names: names of the parameters that have a master.
      held: maps the id of each master tensor to the names of the parameters in it.

    Raises:
      ValueError: masters of another form, length, size or dtype; a dict without exactly one entry.
    """

    def __init__(
        self, sizes: Mapping[str, int], fewer: Sequence[Collection[str]], fp32_params: Any
    ) -> None:
        if isinstance(fp32_params, dict):
            if len(fp32_params) != 1:
                raise ValueError(f"`fp32_params` must have one entry, got {len(fp32_params)}.")
            (fp32_params,) = fp32_params.values()
        is_flat = isinstance(fp32_params, torch.Tensor)
        self.tensors = [fp32_params] if is_flat else _as_list(fp32_params)
        wrong = [i for i, t in enumerate(self.tensors) if t.dtype != torch.float32]
        if wrong:
            raise ValueError(
                f"`fp32_params` must be float32, got {self.tensors[wrong[0]].dtype} at {wrong[0]}."
            )
        present = [tensor.numel() for tensor in self.tensors]
        choices = [sizes, *({n: sizes[n] for n in sizes if n in names} for names in fewer)]
        fitting = [
            some
            for some in choices
            if present == ([sum(some.values())] if is_flat else [*some.values()])
        ]
        if not fitting:
            raise ValueError(
                f"`fp32_params` must have the {sum(sizes.values())} elements of the parameters in "
                f"one tensor, or in {len(sizes)} like these, got {sum(present)} in {len(present)}."
            )
        self._sizes = fitting[0]
        self.names = names = [*self._sizes]
        self.held = {id(t): names if is_flat else [names[i]] for i, t in enumerate(self.tensors)}

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the float32 vector of each parameter, a view of its master."""
        flats = [master.detach().reshape(-1) for master in self.tensors]
        if len(flats) == 1:
            flats = flats[0].split([*self._sizes.values()])
        return dict(zip(self._sizes, flats, strict=True))

    def become(self, names: Sequence[str], flat: torch.Tensor) -> Writes:
        """Return writes: the masters of the named parameters become the elements of `flat`."""
        sizes = [self._sizes[name] for name in names]
        new = dict(zip(names, flat[: sum(sizes)].split(sizes), strict=True))
        flat = flatten([*(self.by_name() | new).values()])
        return [*zip(self.tensors, unflatten(self.tensors, flat), strict=True)]


@dataclass(frozen=True)
class Parameters:
    """The parameters that one call of `perform_slowmo` updates.

    Attributes:
      by_name: those of the module that are exchanged, in its order.
      masters: float32 copies of the module's parameters, or None.
      device: device of both.
      held: maps the id of each tensor that an optimizer may hold, a parameter of the module or a
        master, to the names of the parameters that it stands for.
    """

    by_name: Mapping[str, torch.nn.Parameter]
    masters: Masters | None
    device: torch.device
    held: Mapping[int, Sequence[str]]

    @property
    def tensors(self) -> list[torch.nn.Parameter]:
        """The parameters that are exchanged."""
        return [*self.by_name.values()]

    def frozen(self) -> "Parameters":
        """Return those that no optimizer can change any more."""
        frozen = {name: param for name, param in self.by_name.items() if not may_change(param)}
        return replace(self, by_name=frozen)

    def optimizer_params(self) -> Mapping[str, torch.Tensor]:
        """Return what the optimizer trains, by name: the masters, or the parameters themselves."""
        return self.by_name if self.masters is None else self.masters.by_name()

    def residuals(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return masters minus `sent`, float32 vectors; nothing without masters."""
        if self.masters is None:
            return []
        masters = self.masters.by_name()
        pairs = zip(self.by_name, sent, strict=True)
        return [masters[name] - value.float().reshape(-1) for name, value in pairs]

    def become(self, values: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]) -> Writes:
        """Return writes: parameters become `values`, or with masters `values` plus residuals."""
        if self.masters is None:
            return [*zip(self.tensors, values, strict=True)]
        pairs = zip(residuals, values, strict=True)
        new = flatten([residual + value.float().reshape(-1) for residual, value in pairs])
        return self.become_flat([*self.by_name], new)

    def become_flat(self, names: Sequence[str], flat: torch.Tensor) -> Writes:
        """Return writes: the named parameters and their masters become the elements of `flat`."""
        params = [self.by_name[name] for name in names]
        writes = [] if self.masters is None else self.masters.become(names, flat)
        return [*writes, *zip(params, unflatten(params, flat), strict=True)]


def may_change(param: torch.Tensor) -> bool:
    """Return whether an optimizer may change a parameter: it requires a gradient, or has one."""
    return param.requires_grad or param.grad is not None


def _as_list(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value):
        return list(value)
    raise ValueError(f"`fp32_params` must be tensors, got {type(value).__name__}.")


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
        first = {id(self._group_of[name]): name for name in reversed(self.names)}
        of_group = {key: _rate(self._group_of[name], name, device) for key, name in first.items()}
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
                f"`optimizer` must be one with parameters, or a list, got {optimizer!r}."
            )
    return several


def _rate(group: Mapping[str, Any], name: str, device: torch.device) -> float:
    rate = group.get("lr")
    if rate is None:
        raise ValueError(
            f"`optimizer` must have an `lr` in each group under slow momentum, got None in that of "
            f"{name!r}: give it one, or set slowmo_momentum=0 and slowmo_lr=1."
        )
    if isinstance(rate, torch.Tensor) and rate.device.type == "xla":
        launch(device)  # reading a pending value would launch its graph in no fixed order
    return max(float(rate), 0.0)
