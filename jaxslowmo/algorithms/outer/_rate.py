"""What an outer optimizer is told of the inner learning rate."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

NO_RATE = -1.0  # of a replica that has run out of data: its optimizer has not counted on


class OuterRate(NamedTuple):
    """What an outer optimizer is told of the inner learning rate.

    Attributes:
      now: `now(count, told)`: the rate of an update, from how many were before and from what else
        `update` was given.
      observe: `observe(outer, rate)`: the outer state after an update at this rate, slow or not;
        None where it stays.
      agree: `agree(outer, rate, axes)`: state and rate as one for replicas of which each was told
        its own; it is `NO_RATE` where nothing was moved. None where all are told one.
      is_told: whether `update` must be given `learning_rate=`.
    """

    now: Callable[[jax.Array, Mapping[str, Any]], jax.Array]
    observe: Callable[[Any, jax.Array], Any] | None = None
    agree: Callable[[Any, jax.Array, tuple[str, ...]], tuple[Any, jax.Array]] | None = None
    is_told: bool = False
