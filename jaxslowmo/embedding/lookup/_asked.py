"""A batch asks for rows; these values stand in a step between the request and the loss."""

from typing import Any, NamedTuple

import jax

from ..._support.types import PyTree
from .._requests import Requests


class Ahead(NamedTuple):
    """How much is done for the next batch beside a step; static.

    Attributes:
      vectors: whether rows are looked up and sent, too, not row numbers alone.
      patches: whether those that the step changes are sent again.
      room: is the part of the slots for the rows that one device asks of another for which there is
        room in what is sent again, 0 to 1.
    """

    vectors: bool = False
    patches: bool = False
    room: float = 0.25


class Carry(NamedTuple):
    """A request for the rows of a batch, made beside an earlier step; leaves (devices, ...).

    Attributes:
      requests: what each device asks for, and is asked by others.
      vectors: the rows that it asked for, as the tables had them; None where they are looked up in
        the batch's own step.
    """

    requests: Requests
    vectors: PyTree | None


class Requested(NamedTuple):
    """A device's part of a batch, and what it asked for; without tables the batch alone.

    Attributes:
      batch: is the batch as the step was given it.
      requests: what it asks the tables for, and is asked by others.
      vectors: holds by table the rows that it asked for.
      counts: what the requests of all devices of the replica tell (`Embeddings.metrics`), summed;
        zeros on a replica of weight 0, whose batch may hold anything. Nothing without tables.
      refused: () int32, ids that `counts` counts because of which no update must be made; None
        without tables.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree
    counts: dict[str, jax.Array]
    refused: jax.Array | None


class WithVectors(NamedTuple):
    """A batch as a loss function sees it, and what was looked up for it.

    Attributes:
      batch: is the batch as the step was given it.
      embedded: holds by feature rows or sums of rows, of shape (examples, ...).
    """

    batch: PyTree
    embedded: Any
