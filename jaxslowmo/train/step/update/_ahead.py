"""What a step asks of the tables for the batch after its own."""

from typing import NamedTuple

import jax
from jax import lax

from ...._typing import PyTree
from ....embedding import Requests


class Ahead(NamedTuple):
    """How much is done for the next batch beside a step; static.

    Attributes:
      vectors: whether rows are looked up and sent, too, not row numbers alone.
      patches: whether those that the step changes are sent again.
      room: of the slots for the rows that one device asks of another, the part that there is room
        for in what is sent again.
    """

    vectors: bool = False
    patches: bool = False
    room: float = 0.25


class Carry(NamedTuple):
    """What was asked for a batch beside an earlier step; leaves (devices, ...).

    Attributes:
      requests: what each device asks for, and is asked by others.
      vectors: the rows that it asked for, as the tables had them; None where they are looked up in
        the batch's own step.
    """

    requests: Requests
    vectors: PyTree | None


def sums_over(counts: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    """Sums of counts over the devices of a replica.

    Communication: one all-reduce of 4 bytes each over `axes`, which the compiler joins.
    """
    return lax.psum(counts, axes) if axes else counts
