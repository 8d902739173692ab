"""The start of slow momentum, and its steps, in one process."""

import warnings
from collections.abc import Callable, Sequence

import torch

from .._collectives import Collectives
from .._flat import flatten, unflatten
from .._graphs import own_graph
from .._half import Parameters
from .._push_sum import PushSum
from ..backends import Kind
from ._groups import Groups
from ._momentum import SlowMomentum, Span


class SlowSteps:
    """The start of slow momentum, and its steps, in one process.

    Args:
      is_sharded: whether every process keeps a part of anchor and momentum, and slow steps average
        exactly over all processes; otherwise each keeps them whole and nothing is sent.
      is_bounded: whether the carried velocity has the bound of `Rates.carry`, for which the
        learning rates of every update are read.

    Attributes:
      momentum: anchor and velocity; None before there is an anchor.
      initial: (N + 1,) float32, the parameters that the first forward pass in training mode saw,
        until they have become the anchor.
    """

    def __init__(
        self, collectives: Collectives, push_sum: PushSum, *, is_sharded: bool, is_bounded: bool
    ) -> None:
        self._collectives = collectives
        self._push_sum = push_sum
        self.is_sharded = is_sharded
        self._is_bounded = is_bounded
        self.momentum: SlowMomentum | None = None
        self.initial: torch.Tensor | None = None

    def span(self, ends: tuple[int, ...]) -> Span:
        """Return the part of slow momentum that this process keeps."""
        places = self._collectives.places
        return Span(ends, places.world_size, places.rank) if self.is_sharded else Span(ends)

    def remember(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        """Keep the initial parameters until there is an optimizer, unless they are kept already."""
        if self.momentum is None and self.initial is None:
            with own_graph(device):
                # One extra element, so that the result is never a view of a parameter.
                length = 1 + sum(param.numel() for param in params)
                self.initial = flatten([param.detach().float() for param in params], length)

    def anchor_now(self, groups: Groups, device: torch.device) -> None:
        """Anchor slow momentum at the current parameters.

        Raises:
          ValueError: parameters in half precision.
        """
        self.initial = None
        self._anchor_at(groups, dict, device)

    def ready(self, groups: Groups, params: Parameters) -> SlowMomentum:
        """Return slow momentum of these parameters on their device; the first call starts it.

        The `stacklevel` of warnings is that of the caller of `perform_slowmo`, which calls this.

        Raises:
          ValueError: parameters in half precision, or others than at the start.
          UserWarning: slow momentum starts at current values, since no initial ones were kept.
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
            momentum = self._anchor_at(groups, lambda: self._initial_by_id(params), params.device)
            self.initial = None
        else:
            momentum = self.momentum
        if groups.ends != momentum.span.ends:
            raise ValueError(
                "`optimizer` must hold the parameters that slow momentum was started with, in "
                f"groups that end at elements {momentum.span.ends}, got {groups.ends}; after "
                "adding parameters call _init_global_momentum_buffers(optimizer)."
            )
        momentum.to(params.device)
        if self._is_bounded:
            momentum.rates.observe(groups.rates(params.device))
        return momentum

    def step(
        self,
        slow: SlowMomentum,
        groups: Groups,
        params: Parameters,
        decay: float,
        slow_lr: float,
    ) -> None:
        """Take a step of slow momentum on the optimizer's parameters.

        Args:
          slow: result of `ready`.
          groups: groups of the optimizer.
          params: parameters of the module.
          decay: factor of the slow momentum, in [0, 1).
          slow_lr: step size of the slow step.

        Communication: the collectives of `SlowMomentum.step`, and an all-reduce of 4 bytes if
          push-sum weights can differ from 1; nothing if it is not sharded.
        """
        push_sum = self._push_sum
        rates = groups.rates(params.device)
        carry = slow.rates.carry(rates, decay, is_bounded=self._is_bounded)
        weights: list[torch.Tensor] = []
        with own_graph(params.device) as writes:
            scale = unscale = None
            present = {id(param): param.detach() for param in params.tensors}
            if push_sum.moves and self.is_sharded:
                # The average is sum x / sum w.
                present = dict(zip(present, push_sum.numerators(params.tensors), strict=True))
                weights = self._collectives.shares([push_sum.weight])
                weights = self._collectives.only_masters(weights)
                # w becomes 1, so parameters without slow momentum must become estimates.
                estimates = push_sum.estimates(list(present.values()))
                writes.extend(zip(params.tensors, estimates, strict=True))
            elif push_sum.moves and params.masters:
                # Masters stay numerators; the step is computed on their estimates.
                scale, unscale = 1 / push_sum.weight, push_sum.weight
            elif push_sum.moves and push_sum.is_numerator:
                present = dict(zip(present, push_sum.estimates(params.tensors), strict=True))
                writes.extend(zip(params.tensors, present.values(), strict=True))
            values = [present.get(id(param), param.detach()) for param in groups.params]
            flat = flatten(values, slow.span.padded)
        exchange = own_graph(params.device)
        if self.is_sharded:
            exchange = self._collectives.graph(params.device, Kind.SLOW_STEP, [flat])
        with exchange:
            if weights:
                scale = 1 / self._collectives.total(weights)[0]
                push_sum.reset()
            collectives = self._collectives if self.is_sharded else None
            flat = slow.step(flat, carry, slow_lr, collectives, scale, unscale)
        with own_graph(params.device) as writes:
            new = unflatten(groups.params, flat)
            writes.extend(zip(groups.params, new, strict=True))
            if params.masters:
                by_id = dict(zip(map(id, groups.params), new, strict=True))
                writes.extend(params.masters.rounded(by_id))
        push_sum.is_numerator = unscale is not None

    def _initial_by_id(self, params: Parameters) -> dict[int, torch.Tensor]:
        """Return initial values of parameters and masters, by the tensors' ids; {} without any."""
        if self.initial is None:
            return {}
        sizes = [param.numel() for param in params.tensors]
        values = self.initial.to(params.device)[: sum(sizes)].split(sizes)
        by_id = {id(param): value for param, value in zip(params.tensors, values, strict=True)}
        return by_id | (params.masters.initial(values) if params.masters else {})

    def _anchor_at(
        self,
        groups: Groups,
        initial: Callable[[], dict[int, torch.Tensor]],
        device: torch.device,
    ) -> SlowMomentum:
        """Start slow momentum at `initial()`, by id; other parameters at their current values."""
        wrong = next((p for p in groups.params if p.dtype != torch.float32), None)
        if wrong is not None:
            raise ValueError(
                "`optimizer` must hold float32 parameters under slow momentum, got "
                f"{wrong.dtype}: give it float32 masters, and those to perform_slowmo as "
                "`fp32_params`; or set slowmo_momentum=0 and slowmo_lr=1."
            )
        span = self.span(groups.ends)
        with own_graph(device):
            values = initial()
            momentum = span.started_at([values.get(id(p), p) for p in groups.params])
        self.momentum = momentum
        if values and any(id(param) not in values for param in groups.params):
            warnings.warn(
                "`optimizer` holds parameters that are not those of the module: slow momentum is "
                "anchored at their values of this moment.",
                stacklevel=4,
            )
        return momentum
