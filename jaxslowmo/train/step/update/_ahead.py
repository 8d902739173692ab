"""What a step asks of the tables for the batch after its own."""

from typing import Any, NamedTuple

import jax
from jax import lax

from ...._typing import PyTree
from ....embedding import Requests, patched_rows
from ._replica_step import Tables
from ._shards import on_shards


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


def patched(
    tables: Tables,
    stored: PyTree,
    carry: Carry,
    changed: PyTree,
    moved_all: bool | jax.Array,
    ahead: Ahead,
    inner_axes: tuple[str, ...],
) -> tuple[Carry, dict[str, jax.Array]]:
    """The rows that were sent ahead, those that have changed since sent again.

    Args:
      tables: of the step.
      stored: as they are now.
      carry: what was asked for the next batch.
      changed: by stored array, the rows of each device that the update has moved.
      moved_all: whether an exchange of parameters has moved all.
      ahead: how much room there is.
      inner_axes: inside a replica, over which the batch is split.

    Communication: that of `patched_rows`, and one all-reduce of the counts.
    """
    embeddings = tables.embeddings
    # What is known is no array: the program then holds one of the two ways.
    known = isinstance(moved_all, bool)
    told: Any = () if known else (moved_all,)

    def inside(stored: PyTree, carry: Carry, changed: PyTree, told: Any) -> Any:
        assert carry.vectors is not None, "they were looked up ahead"
        vectors, resent = patched_rows(
            embeddings.layout(),
            embeddings.axis_name,
            stored,
            carry.requests,
            carry.vectors,
            changed,
            room=ahead.room,
            everything=moved_all if known else told[0],
        )
        counts = {f"embeddings/{name}/resent": n for name, n in resent.items()}
        return carry._replace(vectors=vectors), sums_over(counts, inner_axes)

    return on_shards(
        tables.nested,
        inside,
        stored,
        carry,
        changed,
        told,
        kinds=(embeddings.specs, "device", "device", "whole"),
        out=("device", "whole"),
    )
