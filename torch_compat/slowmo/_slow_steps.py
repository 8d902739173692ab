"""Slow momentum on the parameters of an optimizer: where it starts, and its steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ._collectives import Collectives, own_graph
from ._flat import flatten, unflatten
from ._half import Masters
from ._optimizer import ends_of, rate_of
from ._push_sum import PushSum
from ._slow_momentum import SlowMomentum, Span


class SlowSteps:
    """The slow steps of one process.

    Args:
      is_sharded: every process keeps a part of anchor and momentum, and slow steps average exactly
        over all processes; otherwise each keeps them whole and nothing is sent.

    Attributes:
      momentum: anchor and velocity; None before there is an anchor.
      initial: (N + 1,) float32, the parameters that the first forward pass in training mode saw,
        until they have become the anchor.
    """

    def __init__(self, collectives: Collectives, push_sum: PushSum, is_sharded: bool) -> None:
        self._collectives = collectives
        self._push_sum = push_sum
        self.is_sharded = is_sharded
        self.momentum: SlowMomentum | None = None
        self.initial: torch.Tensor | None = None

    def span(self, ends: tuple[int, ...]) -> Span:
        """The part of slow momentum that this process keeps."""
        places = self._collectives.places
        return Span(ends, places.world_size, places.rank) if self.is_sharded else Span(ends)

    def remember(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        """Keep the initial parameters until there is an optimizer, unless they are known."""
        if self.momentum is None and self.initial is None:
            with own_graph(device):
                # One element more, so that it never is a view of a parameter.
                length = 1 + sum(param.numel() for param in params)
                self.initial = flatten([param.detach().float() for param in params], length)

    def anchor_now(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Start at the values of this moment.

        Raises:
          ValueError: parameters in half precision.
        """
        self.initial = None
        self._anchor_at(groups, dict, device)

    def ready(
        self,
        groups: Sequence[Mapping[str, Any]],
        params: Sequence[torch.Tensor],
        masters: Masters | None,
        device: torch.device,
    ) -> SlowMomentum:
        """Slow momentum of these parameters on `device`; the first call starts it.

        Raises:
          ValueError: parameters in half precision, or others than those it was started with.
          UserWarning: it starts at the values of this moment, for want of initial ones.
        """
        if self.momentum is None:
            if self.initial is None:
                warnings.warn(
                    "Slow momentum is anchored at the parameters of this moment, since no forward "
                    "pass in training mode came before the first perform_slowmo(). To anchor it at "
                    "the initial ones call _init_global_momentum_buffers(optimizer) before "
                    "training.",
                    stacklevel=3,
                )
            momentum = self._anchor_at(
                groups, lambda: self._initial_by_id(params, masters, device), device
            )
            self.initial = None
        else:
            momentum = self.momentum
        if ends_of(groups) != momentum.span.ends:
            raise ValueError(
                "`optimizer` must hold the parameters that slow momentum was started with, in "
                f"groups that end at elements {momentum.span.ends}, got {ends_of(groups)}; after "
                "adding parameters call _init_global_momentum_buffers(optimizer)."
            )
        momentum.to(device)
        return momentum

    def step(
        self,
        slow: SlowMomentum,
        groups: Sequence[Mapping[str, Any]],
        params: Sequence[torch.Tensor],
        masters: Masters | None,
        decay: float,
        slow_lr: float,
        device: torch.device,
    ) -> None:
        """Slow momentum on the optimizer's parameters.

        Args:
          slow: that of `ready`.
          groups: of the optimizer.
          params: of the module.
          masters: float32 copies of `params`, where these are in half precision.
          decay: slow momentum's, in [0, 1).
          slow_lr: step size.
          device: that of `params`.

        Communication: that of `SlowMomentum.step`, and an all-reduce of 4 bytes where push-sum
          weights move; nothing where it is not sharded.
        """
        push_sum = self._push_sum
        rates = [rate_of(group, i, device) for i, group in enumerate(groups)]
        held: list[torch.Tensor] = [param for group in groups for param in group["params"]]
        weights: list[torch.Tensor] = []
        with own_graph(device) as writes:
            scale = unscale = None
            present = {id(param): param.detach() for param in params}
            if push_sum.moves and self.is_sharded:
                present = dict(zip(present, push_sum.numerators(params), strict=True))
                weights = self._collectives.shares([push_sum.weight])
                weights = self._collectives.only_masters(weights)
                # w becomes 1, and parameters without slow momentum must not notice.
                estimates = push_sum.estimates(list(present.values()))
                writes.extend(zip(params, estimates, strict=True))
            elif push_sum.moves and masters:
                scale, unscale = 1 / push_sum.weight, push_sum.weight
            elif push_sum.moves and push_sum.is_numerator:
                present = dict(zip(present, push_sum.estimates(params), strict=True))
                writes.extend(zip(params, present.values(), strict=True))
            values = [present.get(id(param), param.detach()) for param in held]
            flat = flatten(values, slow.span.padded)
        with own_graph(device):
            if weights:
                scale = 1 / self._collectives.total(weights)[0]
                push_sum.reset()
            collectives = self._collectives if self.is_sharded else None
            flat = slow.step(flat, rates, decay, slow_lr, collectives, scale, unscale)
        with own_graph(device) as writes:
            new = unflatten(held, flat)
            writes.extend(zip(held, new, strict=True))
            if masters:
                writes.extend(masters.rounded(dict(zip(map(id, held), new, strict=True))))
        push_sum.is_numerator = unscale is not None

    def _initial_by_id(
        self, params: Sequence[torch.Tensor], masters: Masters | None, device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Initial values of parameters and masters, by the tensors' ids; {} if not remembered."""
        if self.initial is None:
            return {}
        sizes = [param.numel() for param in params]
        values = self.initial.to(device)[: sum(sizes)].split(sizes)
        return {
            **{id(param): value for param, value in zip(params, values, strict=True)},
            **(masters.initial(values) if masters else {}),
        }

    def _anchor_at(
        self,
        groups: Sequence[Mapping[str, Any]],
        initial: Callable[[], dict[int, torch.Tensor]],
        device: torch.device,
    ) -> SlowMomentum:
        """Start slow momentum at `initial()`, by id; elsewhere at the values of this moment."""
        held: list[torch.Tensor] = [param for group in groups for param in group["params"]]
        wrong = next((p for p in held if p.dtype != torch.float32), None)
        if wrong is not None:
            raise ValueError(
                "`optimizer` must hold float32 parameters under slow momentum, got "
                f"{wrong.dtype}: give it float32 masters, and those to perform_slowmo as "
                "`fp32_params`; or set slowmo_momentum=0 and slowmo_lr=1."
            )
        span = self.span(ends_of(groups))
        with own_graph(device):
            values = initial()
            momentum = span.started_at([values.get(id(param), param) for param in held])
        self.momentum = momentum
        if values and any(id(param) not in values for param in held):
            warnings.warn(
                "`optimizer` holds parameters that are not those of the module: slow momentum is "
                "anchored at their values of this moment.",
                stacklevel=4,
            )
        return momentum
