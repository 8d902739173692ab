"""The factors with which slow momentum carries its velocity when learning rates change."""

import math
from collections.abc import Sequence


class Rates:
    """The learning rates that the carried part of slow momentum depends on, per parameter.

    Attributes:
      last: gamma of the last slow step; 0 before the first.
      made_at: r, the rate at which the velocity was made: the largest gamma between the last two
        slow steps, or momentum times the previous r if that is more; 0 if not known.
      since: the largest gamma since the last slow step; 0 if none was observed.
    """

    def __init__(
        self, last: Sequence[float], made_at: Sequence[float], since: Sequence[float]
    ) -> None:
        self.last, self.made_at, self.since = list(last), list(made_at), list(since)

    @classmethod
    def unknown(cls, num: int) -> "Rates":
        """Return the rates of slow momentum that has taken no step."""
        nothing = [0.0] * num
        return cls(nothing, nothing, nothing)

    def of(self, places: Sequence[int | None]) -> "Rates":
        """Return the rates of the parameters at `places` in these; None is a new parameter."""
        fields = (self.last, self.made_at, self.since)
        return Rates(*([0.0 if i is None else rates[i] for i in places] for rates in fields))

    def observe(self, rates: Sequence[float]) -> None:
        """Note the rates of an update, slow or not: the velocity will hold its displacement."""
        self.since = list(map(max, self.since, rates))

    def carry(self, rates: Sequence[float], momentum: float, *, is_bounded: bool) -> list[float]:
        """Return the factor of the velocity in a slow step at `rates`, and note `rates`.

        It is momentum * gamma_now / gamma_before, with 1 for a ratio whose divisor is 0. If
        bounded, it is at most gamma_now / r, or momentum if that is more.

        Source: `jaxslowmo.slow_momentum`, which has the same rule.
        """
        factors = []
        for now, last, made_at in zip(rates, self.last, self.made_at, strict=True):
            limit = max(momentum, _ratio(now, made_at)) if is_bounded else math.inf
            factors.append(min(momentum * _ratio(now, last), limit))
        self.observe(rates)
        self.made_at = [
            max(momentum * r, high) for r, high in zip(self.made_at, self.since, strict=True)
        ]
        self.last, self.since = list(rates), [0.0] * len(rates)
        return factors


def _ratio(now: float, before: float) -> float:
    return now / before if before else 1.0
