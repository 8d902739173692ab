"""What slow momentum carries on where learning rates change between slow steps."""

import math
from collections.abc import Sequence


class Rates:
    """The learning rates that the carried part of slow momentum depends on, per optimizer group.

    Attributes:
      last: gamma of the last slow step; 0 before the first.
      made_at: r, the rate at which the velocity was made: the largest gamma since the slow step
        before the last, or momentum times the r of then, where that is more; 0 where not known.
      since: the largest gamma since the last slow step; 0 where none was observed.
    """

    def __init__(
        self, last: Sequence[float], made_at: Sequence[float], since: Sequence[float]
    ) -> None:
        self.last, self.made_at, self.since = list(last), list(made_at), list(since)

    @classmethod
    def unknown(cls, num_groups: int) -> "Rates":
        """Those of slow momentum that has taken no step."""
        nothing = [0.0] * num_groups
        return cls(nothing, nothing, nothing)

    def observe(self, rates: Sequence[float]) -> None:
        """Note the rates of an update, slow or not: what it moves, the velocity will hold."""
        self.since = list(map(max, self.since, rates))

    def carry(self, rates: Sequence[float], momentum: float, *, is_bounded: bool) -> list[float]:
        """Return per group the factor of the velocity in a slow step at `rates`, which this notes.

        It is momentum * gamma_now / gamma_before, 1 in place of a ratio whose divisor is 0. Bounded
        it is at most gamma_now / r, or momentum where that is more.

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
