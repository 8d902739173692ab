"""What a batch asks for, and what stands in a step between asking and the loss."""

from typing import Any, NamedTuple

import jax

from ..._typing import PyTree
from .._requests import Requests


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


class Requested(NamedTuple):
    """A device's part of a batch, and what it asked for.

    Attributes:
      batch: as the step was given it.
      requests: what it asks the tables for, and is asked by others.
      vectors: by table, the rows that it asked for.
      counts: what the requests of all devices of the replica tell (`Embeddings.metrics`), summed;
        zeros on a replica of weight 0, whose batch may hold anything.
      refused: () int32, ids that `counts` counts because of which no update must be made.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree
    counts: dict[str, jax.Array]
    refused: jax.Array


class WithVectors(NamedTuple):
    """A batch as a loss function sees it, and what was looked up for it.

    Attributes:
      batch: as the step was given it.
      embedded: by feature, (examples, ...), rows or sums of rows.
    """

    batch: PyTree
    embedded: Any
