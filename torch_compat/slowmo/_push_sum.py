"""The push-sum weight of a process, and whether its module holds x or x / w."""

from collections.abc import Sequence

import torch

from .. import runtime
from ._collectives import write
from ._flat import times


class PushSum:
    """Conversions between numerators x and estimates x / w; nothing where weights stay 1.

    Args:
      is_on: whether the base algorithm is SGP.
      moves: whether weights can differ from 1.

    Attributes:
      weight: (1,) float32, w.
      is_numerator: whether the module holds x.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
      (arXiv:1811.10792), algorithm 1.
    """

    def __init__(self, is_on: bool, moves: bool) -> None:
        self.is_on = is_on
        self.moves = moves
        self.weight = torch.ones(1)
        self.is_numerator = False

    def to(self, device: torch.device) -> None:
        """Move a weight that was made or loaded on the host to the device of the parameters."""
        if self.weight.device != device:
            (self.weight,) = runtime.to_device([self.weight], device)

    def reset(self) -> None:
        """The weight becomes 1, after an exact average."""
        self.weight = torch.ones_like(self.weight)

    def numerators(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """x = w * estimate of every parameter, whichever of both the module holds."""
        if self.is_numerator or not self.moves:
            return [param.detach() for param in params]
        return [times(param.detach(), self.weight) for param in params]

    def estimates(self, numerators: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """x / w of every numerator."""
        if not self.moves:
            return list(numerators)
        return [times(x.detach(), 1 / self.weight) for x in numerators]

    def make_numerators(self, params: Sequence[torch.Tensor]) -> None:
        """Parameters become x, on which optimizer and exchange work."""
        if not self.is_numerator and self.moves:
            write(zip(params, self.numerators(params), strict=True))
        self.is_numerator = self.is_on

    def make_estimates(self, params: Sequence[torch.Tensor]) -> None:
        """Parameters become x / w, which a forward pass shall see."""
        if self.is_numerator and self.moves:
            write(zip(params, self.estimates(params), strict=True))
        self.is_numerator = False
