"""What one call of a step is given beside the state, and what it does for the batch after."""

from typing import Any, NamedTuple

import jax

from ...._typing import PyTree
from ....embedding import Requests
from ._window import ROLES, GradientWindow


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


class Given(NamedTuple):
    """What a program is given beside the state; in it the replica's, or a device's part of it.

    Attributes:
      batch: None for an update of a window alone.
      weight: () the replica's share in averages; None where all are alike.
      window: the batches of the same update so far; None where there are none.
      carry: what was asked of the tables for the batch beside an earlier one; None for nothing.
      upcoming: the batch that comes next; None where nothing is to be done for it.
    """

    batch: PyTree = None
    weight: jax.Array | None = None
    window: GradientWindow | None = None
    carry: Carry | None = None
    upcoming: PyTree = None


# How each part relates to the replicas, as `map_replicas` wants to know.
GIVEN_ROLES: Any = Given._make(("batch", "stacked", ROLES, "device", "batch"))
