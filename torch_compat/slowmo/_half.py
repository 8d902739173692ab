"""Half-precision parameters with float32 masters: averages that lose nothing by rounding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._flat import flatten, unflatten
from ._graphs import Writes

HALF = (torch.float16, torch.bfloat16)


class Masters:
    """The float32 copies of the module's parameters, in the forms `perform_slowmo` accepts.

    The exchange runs on the half-precision parameters. The difference to the master (the residual)
    stays in this process and is added to the average: error feedback.

    Args:
      params: the module's parameters.
      fp32_params: one float32 vector of all parameters in their order, or a list with a float32
        tensor for each, or a dict with one such value.

    Raises:
      ValueError: masters of another form, length, size or dtype; a dict without exactly one entry.
    """

    def __init__(self, params: Sequence[torch.Tensor], fp32_params: Any) -> None:
        if isinstance(fp32_params, dict):
            if len(fp32_params) != 1:
                raise ValueError(
                    f"`fp32_params` as a dict must have one entry, got {len(fp32_params)}: "
                    f"{', '.join(map(repr, fp32_params))}."
                )
            (fp32_params,) = fp32_params.values()
        self.is_flat = isinstance(fp32_params, torch.Tensor)
        self.tensors = [fp32_params] if self.is_flat else _as_list(fp32_params)
        self.params = list(params)
        self._check()

    def residuals(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return master minus the value sent for it, float32, for each parameter."""
        return [
            master - value.float().reshape(-1)
            for master, value in zip(self._per_param(), sent, strict=True)
        ]

    def restored(self, residuals: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Writes:
        """Return writes: masters become residual + value, parameters the rounded masters."""
        pairs = zip(residuals, values, strict=True)
        flat = flatten([residual + value.float().reshape(-1) for residual, value in pairs])
        targets = [*self.tensors, *self.params]
        values = [part for half in (self.tensors, self.params) for part in unflatten(half, flat)]
        return [*zip(targets, values, strict=True)]

    def rounded(self, new: Mapping[int, torch.Tensor]) -> Writes:
        """Return writes: parameters become the rounded masters; `new` holds changed ones by id."""
        masters = [new.get(id(master), master.detach()) for master in self.tensors]
        return [*zip(self.params, unflatten(self.params, flatten(masters)), strict=True)]

    def initial(self, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the masters of parameters `values`, by `id` of the master tensor."""
        if self.is_flat:
            return {id(self.tensors[0]): flatten([value.float() for value in values])}
        return {
            id(master): value.float() for master, value in zip(self.tensors, values, strict=True)
        }

    def _per_param(self) -> list[torch.Tensor]:
        sizes = [param.numel() for param in self.params]
        if self.is_flat:
            return list(self.tensors[0].detach().reshape(-1).split(sizes))
        return [master.detach().reshape(-1) for master in self.tensors]

    def _check(self) -> None:
        wrong = [i for i, t in enumerate(self.tensors) if t.dtype != torch.float32]
        if wrong:
            raise ValueError(
                f"`fp32_params` must be float32, got {self.tensors[wrong[0]].dtype} at {wrong[0]}."
            )
        sizes = [param.numel() for param in self.params]
        master_sizes = [master.numel() for master in self.tensors]
        if self.is_flat and master_sizes != [sum(sizes)]:
            raise ValueError(
                "`fp32_params` as one tensor must have the elements of all parameters, "
                f"{sum(sizes)}, got {master_sizes[0]}."
            )
        if not self.is_flat and len(master_sizes) != len(sizes):
            raise ValueError(
                "`fp32_params` as a list must have one tensor per parameter of the module, "
                f"{len(sizes)}, got {len(master_sizes)}."
            )
        bad = [] if self.is_flat else [i for i, n in enumerate(sizes) if master_sizes[i] != n]
        if bad:
            raise ValueError(
                f"`fp32_params`[{bad[0]}] must have the {sizes[bad[0]]} elements of parameter "
                f"{bad[0]} of the module, got {master_sizes[bad[0]]}."
            )


@dataclass(frozen=True)
class Parameters:
    """The parameters that one call of `perform_slowmo` updates.

    Attributes:
      tensors: the module's parameters, in their order.
      masters: their float32 copies, or None.
      device: device of both.
    """

    tensors: list[torch.nn.Parameter]
    masters: Masters | None
    device: torch.device

    def residuals(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the masters minus `sent`; nothing without masters."""
        return [] if self.masters is None else self.masters.residuals(sent)

    def become(self, values: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]) -> Writes:
        """Return writes: parameters become `values`, or with masters `values` plus residuals."""
        if self.masters is None:
            return [*zip(self.tensors, values, strict=True)]
        return self.masters.restored(residuals, values)


def _as_list(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value):
        return list(value)
    raise ValueError(
        "`fp32_params` must be a tensor, a list of tensors, or a dict with one of these, got "
        f"{type(value).__name__}."
    )
