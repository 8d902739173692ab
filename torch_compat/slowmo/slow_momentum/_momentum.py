"""The slow step: anchor and velocity on the flat vector of named parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._flat import flatten
from .._graphs import device_data, to_device
from ._rates import Rates


@dataclass(frozen=True)
class Span:
    """The part of the flat vector of named parameters that a process keeps.

    Attributes:
      sizes: number of elements of each parameter, by name, in the module's order.
      num_parts: number of equal parts; the last ones may reach beyond the end of the vector.
      index: index of this part.
    """

    sizes: Mapping[str, int]
    num_parts: int = 1
    index: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self.sizes)

    @property
    def total(self) -> int:
        """The number of elements of the vector."""
        return sum(self.sizes.values())

    @property
    def length(self) -> int:
        """The number of elements of the part, padding included."""
        return math.ceil(self.total / self.num_parts)

    @property
    def padded(self) -> int:
        """The number of elements of all parts together."""
        return self.num_parts * self.length

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the elements of each parameter in a whole vector, padded or not."""
        parts = flat[: self.total].split(list(self.sizes.values()))
        return dict(zip(self.names, parts, strict=True))

    def part(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this part of the vector of `values`, those of all names in order; a copy.

        On an XLA device call it inside `own_graph`. The index of the part is data, so that the
        graph is the same on all processes.
        """
        rows = self.num_parts + 1  # one more, so that the result is never a view of a parameter
        flat = flatten(values, rows * self.length).reshape(rows, self.length)
        index = device_data([self.index], torch.int64, flat.device)
        return flat.index_select(0, index).reshape(-1)

    def per_element(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        """Return the value of each element's parameter, (length,)."""
        begin, spans, end = self.index * self.length, [], 0
        for size in self.sizes.values():
            end += size
            spans.append(min(max(end - begin, 0), self.length))
        spans[-1] = self.length  # the padding takes the last value
        counts = torch.tensor([0, *spans]).diff()
        each = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
        return to_device([each], device)[0]


class SlowMomentum:
    """The slow step on the flat vector of named parameters.

    With D = anchor - average, gamma the learning rate of the parameter now:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_lr * gamma * m;   params = anchor

    The state is v = gamma * m, and its carried part is rescaled by gamma_now / gamma_before (1 if
    gamma_before is 0), so that a learning rate of 0 makes neither inf nor NaN. `Rates` computes the
    factor.

    Attributes:
      span: the part that this process keeps.
      anchor: (span.length,) float32, the parameters after the last slow step.
      velocity: (span.length,) float32, v.
      rates: the learning rates that the carried part depends on, one for each name.
      has_one_rate: whether all parameters are in one group of an optimizer.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020 (arXiv:1910.00643), algorithm 1.
    """

    def __init__(
        self,
        span: Span,
        anchor: torch.Tensor,
        velocity: torch.Tensor | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.span = span
        self.anchor = anchor
        self.velocity = torch.zeros_like(anchor) if velocity is None else velocity
        self.rates = Rates.unknown(len(span.names)) if rates is None else rates
        self.has_one_rate = False

    def to(self, device: torch.device) -> None:
        """Move tensors that were loaded on the host to the device of the parameters."""
        if self.anchor.device != device:
            self.anchor, self.velocity = to_device([self.anchor, self.velocity], device)

    def step(self, average: torch.Tensor, carry: Sequence[float], slow_lr: float) -> None:
        """Take the slow step, after which `anchor` holds the new parameters.

        Args:
          average: (span.length,) float32, this part of the average of the parameters.
          carry: factor of the velocity of every parameter, see `Rates.carry`.
          slow_lr: step size of the slow step.
        """
        factors = self._factors(carry, average.device)
        self.velocity = factors * self.velocity + (self.anchor - average)
        self.anchor = self.anchor - slow_lr * self.velocity

    def momentum_buffer(self) -> torch.Tensor:
        """Return m = v / gamma, as FairScale keeps it; v if gamma was 0."""
        return self.velocity / self._factors(
            [rate or 1.0 for rate in self.rates.last], self.velocity.device
        )

    def _factors(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        # Parameters that came later have other rates in the past.
        if self.has_one_rate and len(set(values)) == 1:
            return device_data(values[:1], torch.float32, device)
        return self.span.per_element(values, device)
