"""Which steps are measured."""

from collections import Counter

_FIRST = 10


class Sampling:
    """Steps 1 to 10 and every `rate`-th, as torch's logger; the same among those of each exchange.

    Without the latter, parameters exchanged every 48 steps would be measured once in 1,200.

    Raises:
      ValueError: rate < 1.
    """

    def __init__(self, rate: int) -> None:
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            raise ValueError(f"`rate` counts steps and must be an int >= 1, got {rate!r}.")
        self.rate = rate
        self.steps = 0
        self._exchanges: Counter[str] = Counter()

    def next(self, kind: str) -> bool:
        """Counts a step of a kind ("local": nothing but gradients) and tells whether it is due."""
        self.steps += 1
        due = self._among(self.steps)
        if kind != "local":
            self._exchanges[kind] += 1
            due |= self._among(self._exchanges[kind])
        return due

    def _among(self, count: int) -> bool:
        return count <= _FIRST or count % self.rate == 0
