"""Slow momentum: what it reads from the optimizer, its anchor and velocity, and its steps."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ._collectives import Collectives, flatten, unflatten
from ._graphs import device_data, launch, moved, own_graph
from ._half import Parameters
from ._push_sum import PushSum


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
        """The learning rate of each group.

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
            found.append(float(rate))
        return found


@dataclass(frozen=True)
class Span:
    """The part of the flat vector of all optimizer parameters that a process keeps.

    Attributes:
      ends: per optimizer group, where its parameters end in the vector.
      num_parts: equal parts, of which the last ones may reach beyond the end of the vector.
      index: which of them this is.
    """

    ends: tuple[int, ...]
    num_parts: int = 1
    index: int = 0

    @property
    def total(self) -> int:
        """Elements of the vector."""
        return self.ends[-1]

    @property
    def length(self) -> int:
        """Elements of the part, padding included."""
        return math.ceil(self.total / self.num_parts)

    @property
    def padded(self) -> int:
        """Elements of all parts together."""
        return self.num_parts * self.length

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This part of a whole vector (total,), padded with zeros."""
        part = flat[self.index * self.length : (self.index + 1) * self.length]
        return torch.nn.functional.pad(part, (0, self.length - part.numel()))

    def started_at(self, values: Sequence[torch.Tensor]) -> "SlowMomentum":
        """Slow momentum anchored at `values`, those of all optimizer parameters in order.

        To be called inside `own_graph`; which part is kept is data, so that the graph is the same
        on all processes.
        """
        rows = self.num_parts + 1  # one more, so that the anchor is never a view of a parameter
        flat = flatten(values, rows * self.length).reshape(rows, self.length)
        index = device_data([self.index], torch.int64, flat.device)
        return SlowMomentum(self, flat.index_select(0, index).reshape(-1))


class SlowMomentum:
    """The slow step on the flat vector of all optimizer parameters.

    With D = anchor - average, gamma the learning rate of the group now:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_lr * gamma * m;   params = anchor

    v = gamma * m is kept, and its carried part rescaled by gamma_now / gamma_before (1 where
    gamma_before is 0), so that a learning rate of 0 makes neither inf nor NaN.

    Attributes:
      span: which part this process keeps.
      anchor: (span.length,) float32, the parameters after the last slow step.
      velocity: (span.length,) float32, v.
      rates: per group gamma of the last slow step; None before the first.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020 (arXiv:1910.00643), algorithm 1.
    """

    def __init__(
        self,
        span: Span,
        anchor: torch.Tensor,
        velocity: torch.Tensor | None = None,
        rates: Sequence[float] | None = None,
    ) -> None:
        self.span = span
        self.anchor = anchor
        self.velocity = torch.zeros_like(anchor) if velocity is None else velocity
        self.rates = None if rates is None else [float(rate) for rate in rates]

    def to(self, device: torch.device) -> None:
        """Move what was loaded on the host to the device of the parameters."""
        if self.anchor.device != device:
            self.anchor, self.velocity = moved([self.anchor, self.velocity], device)

    def step(
        self,
        flat: torch.Tensor,
        rates: Sequence[float],
        momentum: float,
        slow_lr: float,
        collectives: Collectives | None,
        scale: torch.Tensor | None = None,
        unscale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Average, take the slow step.

        To be called inside `Collectives.graph`.

        Args:
          flat: all optimizer parameters, in the order of the groups, with zeros up to the end of
            the last part.
          rates: learning rate of every group.
          momentum: in [0, 1).
          slow_lr: step size of the slow step.
          collectives: to average over all processes; None leaves out the exchange.
          scale: (1,), by which the average is multiplied; None is 1.
          unscale: (1,), by which the new parameters are multiplied; None is 1.

        Returns:
          Their new values, as `flat`.

        Communication: one reduce-scatter and one all-gather of the float32 vector over all
          processes; nothing with `collectives` None.
        """
        average = flat if collectives is None else collectives.scatter_mean(flat)
        if scale is not None:
            average = average * scale
        carry = device_data(self._carry(rates, momentum), torch.float32, average.device)
        self.velocity = self._per_element(carry) * self.velocity + (self.anchor - average)
        self.anchor = self.anchor - slow_lr * self.velocity
        self.rates = list(rates)
        new = self.anchor if collectives is None else collectives.gather(self.anchor)
        return new if unscale is None else new * unscale

    def momentum_buffer(self) -> torch.Tensor:
        """m = v / gamma, as FairScale keeps it; where gamma was 0, v."""
        rates = [rate or 1.0 for rate in self.rates or [1.0] * len(self.span.ends)]
        divisors = device_data(rates, torch.float32, self.velocity.device)
        return self.velocity / self._per_element(divisors)

    def _carry(self, rates: Sequence[float], momentum: float) -> list[float]:
        before = self.rates or [0.0] * len(rates)
        return [
            momentum * (now / old if old else 1.0) for now, old in zip(rates, before, strict=True)
        ]

    def _per_element(self, values: torch.Tensor) -> torch.Tensor:
        """(length,) or (1,): the value of the group that each element of the part belongs to.

        Where the part begins is data: all processes trace the same graph.
        """
        if len(self.span.ends) == 1:
            return values
        length, device = self.span.length, values.device
        start = device_data([self.span.index * length], torch.int64, device)
        position = torch.arange(length, device=device) + start
        result = values[:1].expand(length)
        for group, end in enumerate(self.span.ends[:-1], start=1):
            result = torch.where(position >= end, values[group : group + 1], result)
        return result


class SlowSteps:
    """Where slow momentum starts, and its steps, for one process.

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

    def anchor_now(self, groups: Groups, device: torch.device) -> None:
        """Start at the values of this moment.

        Raises:
          ValueError: parameters in half precision.
        """
        self.initial = None
        self._anchor_at(groups, dict, device)

    def ready(self, groups: Groups, params: Parameters) -> SlowMomentum:
        """Slow momentum of these parameters on their device; the first call starts it.

        Its warnings point at the caller of `perform_slowmo`, which calls this.

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
        return momentum

    def step(
        self,
        slow: SlowMomentum,
        groups: Groups,
        params: Parameters,
        decay: float,
        slow_lr: float,
    ) -> None:
        """Slow momentum on the optimizer's parameters.

        Args:
          slow: that of `ready`.
          groups: of the optimizer.
          params: of the module.
          decay: slow momentum's, in [0, 1).
          slow_lr: step size.

        Communication: that of `SlowMomentum.step`, and an all-reduce of 4 bytes where push-sum
          weights move; nothing where it is not sharded.
        """
        push_sum = self._push_sum
        rates = groups.rates(params.device)
        weights: list[torch.Tensor] = []
        with own_graph(params.device) as writes:
            scale = unscale = None
            present = {id(param): param.detach() for param in params.tensors}
            if push_sum.moves and self.is_sharded:
                # The average is sum x / sum w.
                present = dict(zip(present, push_sum.numerators(params.tensors), strict=True))
                weights = self._collectives.shares([push_sum.weight])
                weights = self._collectives.only_masters(weights)
                # w becomes 1, and parameters without slow momentum must not notice.
                estimates = push_sum.estimates(list(present.values()))
                writes.extend(zip(params.tensors, estimates, strict=True))
            elif push_sum.moves and params.masters:
                # Masters are numerators and stay so; the step is on what they estimate.
                scale, unscale = 1 / push_sum.weight, push_sum.weight
            elif push_sum.moves and push_sum.is_numerator:
                present = dict(zip(present, push_sum.estimates(params.tensors), strict=True))
                writes.extend(zip(params.tensors, present.values(), strict=True))
            values = [present.get(id(param), param.detach()) for param in groups.params]
            flat = flatten(values, slow.span.padded)
        exchange = self._collectives.graph if self.is_sharded else own_graph
        with exchange(params.device):
            if weights:
                scale = 1 / self._collectives.total(weights)[0]
                push_sum.reset()
            collectives = self._collectives if self.is_sharded else None
            flat = slow.step(flat, rates, decay, slow_lr, collectives, scale, unscale)
        with own_graph(params.device) as writes:
            new = unflatten(groups.params, flat)
            writes.extend(zip(groups.params, new, strict=True))
            if params.masters:
                by_id = dict(zip(map(id, groups.params), new, strict=True))
                writes.extend(params.masters.rounded(by_id))
        push_sum.is_numerator = unscale is not None

    def _initial_by_id(self, params: Parameters) -> dict[int, torch.Tensor]:
        """Initial values of parameters and masters, by the tensors' ids; {} if not remembered."""
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
        """Start slow momentum at `initial()`, by id; elsewhere at the values of this moment."""
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
