"""When an exchange is due: one object, read on the host and inside the program."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .._integers import as_int


@dataclass(frozen=True)
class Every:
    """Every `k`-th update. Made by `every`; call it with t, the 1-based number of the update.

    Attributes:
      k: period in updates.
      start: updates before the schedule begins.
      offset: shift of the first due update after `start`.
      before: whether updates up to `start` are due, `"none"` or `"all"`.
    """

    k: int
    start: int = 0
    offset: int = 0
    before: Literal["none", "all"] = "none"

    def __post_init__(self) -> None:
        numbers = {
            "k": _updates("k", self.k, 1),
            "start": _updates("start", self.start, 0),
            "offset": _updates("offset", self.offset),
        }
        for name, number in numbers.items():
            object.__setattr__(self, name, number)  # as plain ints, whatever they were
        if self.before not in ("none", "all"):
            raise ValueError(f'`before` must be "none" or "all", got {self.before!r}.')

    def __call__(self, t: Any) -> Any:
        """Whether update `t` is due: a bool for an int, an array for an array of integers."""
        start, shifted = self.start, self.start + self.offset
        # The same answer for an int on the host and for a counter in the program.
        if isinstance(t, int):
            is_met = (t - shifted) % self.k == 0
        else:
            start = min(start, int(np.iinfo(t.dtype).max))  # decides the same of all that t can be
            is_met = _is_congruent(t, shifted, self.k)
        running = (t > start) & is_met
        if self.before == "all":
            running = running | (t <= start)
        return running

    def times(self, t: int) -> int:
        """How many of the updates 1 to `t` are due, on the host."""
        # Up to `start` all or none; after it as many as multiples of k between the shifted ends.
        first = min(t, self.start) if self.before == "all" else 0
        running = max(0, t - self.start)
        return first + (running - self.offset) // self.k - (-self.offset) // self.k

    @property
    def is_plain(self) -> bool:
        """Due exactly when t is a multiple of k."""
        return self.before == "none" and (self.start + self.offset) % self.k == 0 == self.start


def every(
    k: int, start: int = 0, offset: int = 0, before: Literal["none", "all"] = "none"
) -> Every:
    """A schedule for `sync_every`: due when t > start and (t - start - offset) % k == 0.

    Args:
      k: period in updates, >= 1.
      start: number of updates before it begins, >= 0. Post-local SGD is
        `every(k, start=s, before="all")`: exchange at every update up to s, then every k-th.
      offset: shifts the due updates after `start` by this many.
      before: `"none"` or `"all"` updates up to `start` are due.

    Returns:
      An `Every`: callable with t = 1, 2, ..., as int on the host or as array in a program;
      hashable.

    Raises:
      ValueError: k < 1, start < 0, another `before`, or values that are no ints.

    Example:
      >>> [t for t in range(1, 10) if every(3)(t)]
      [3, 6, 9]
      >>> [t for t in range(1, 10) if every(3, start=2, before="all")(t)]
      [1, 2, 5, 8]

    Communication: none.
    """
    return Every(k, start, offset, before)


def as_schedule(period: int | Every, argument: str = "sync_every") -> Every:
    """`period` as a schedule; `ValueError` naming `argument` for periods below 1."""
    if isinstance(period, Every):
        return period
    return Every(_updates(argument, period, 1))


_SCAN = 2**16  # instants looked at per schedule; exact for all periods up to that


def instants(schedules: Iterable[Every]) -> list[int]:
    """Updates t among which every combination of due schedules that occurs is found.

    A whole cycle is at most as long as the product of the periods (of their least common multiple,
    where no schedule holds up another, as the slow step does a base that counts its exchanges),
    which may be huge; so beside its beginning only the due updates of each schedule and their
    successors are listed.
    """
    # The product, not the least common multiple: one schedule may hold another one up.
    known = list(schedules)
    cycle = math.prod(s.k for s in known)
    begin = max((s.start + abs(s.offset) for s in known), default=0)
    found = set(range(1, min(begin + cycle, _SCAN) + 1))
    for s in known:
        first = s.start + s.offset % s.k
        due = range(first, first + s.k * min(cycle // s.k + 1, _SCAN), s.k)
        found.update(t for d in due for t in (d, d + 1) if t >= 1)
    return sorted(found)


def _is_congruent(t: Any, shift: int, k: int) -> Any:
    """`(t - shift) % k == 0` for an array of integers and ints that it may be too narrow for."""
    least, most = np.iinfo(t.dtype).min, np.iinfo(t.dtype).max
    first = shift % k
    if k <= most:
        return t % k == first
    # All of its values lie within one period on either side of 0.
    found = t != t  # nowhere
    for candidate in (first - k, first):
        if least <= candidate <= most:
            found = found | (t == candidate)
    return found


def _updates(name: str, value: object, least: int | None = None) -> int:
    number = as_int(value, least)
    if number is None:
        rule = "an int" if least is None else f"an int >= {least}"
        raise ValueError(f"`{name}` counts updates and must be {rule}, got {value!r}.")
    return number
