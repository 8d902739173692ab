"""What one call of a step is given beside the state, and what it does for the batch after."""

from typing import Any, NamedTuple

import jax

from ...._typing import PyTree
from ....embedding import Carry
from ._window import ROLES, GradientWindow


class Given(NamedTuple):
    """What a program is given beside the state; in it the replica's, or a device's part of it.

    Attributes:
      batch: None for an update of a window alone.
      weight: () the replica's share in averages; None where all are alike.
      window: the batches of the same update so far; None where there are none.
      carry: what was asked for the batch beside an earlier one; None for nothing.
      upcoming: the batch that comes next; None where nothing is to be done for it.
    """

    batch: PyTree = None
    weight: jax.Array | None = None
    window: GradientWindow | None = None
    carry: Carry | None = None
    upcoming: PyTree = None


# How each part relates to the replicas, as `map_replicas` wants to know.
GIVEN_ROLES: Any = Given._make(("batch", "stacked", ROLES, "device", "batch"))
