"""What stands in a step between a batch and the tables: its requests, and gradients of its rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..gradients.sparse import RowGradient, Rows, coalesce
from ..mesh import match_varying
from ..transform import unseen_zero
from ..tree import all_finite, at_least_float32, cast
from ._requests import Requests


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


def rows_are_finite(rows: Rows, axes: tuple[str, ...]) -> jax.Array:
    """Whether all values are finite, on all devices along `axes`.

    Communication: one all-reduce of 4 bytes over `axes`.
    """
    found = all_finite(
        [jnp.where((own.rows < own.num_rows)[:, None], own.values, 0) for own in rows.values()]
    )
    return lax.pmin(found.astype(jnp.int32), axes) > 0 if axes else found


def after(rows: dict[str, jax.Array], read: PyTree) -> dict[str, jax.Array]:
    """Numbers of rows by table that are not known before all of `read` is.

    What changes them in a table then comes after what was read from it, which the compiler must
    know: it would keep a copy of the whole table otherwise, so that both could run in any order.
    (A barrier is not enough: jax 0.10 forgets it before copies are decided upon.)

    Communication: none.
    """
    zero = jnp.zeros([], jnp.int32)
    for x in jax.tree.leaves(read):
        zero = zero + unseen_zero(x)
    return {name: x + match_varying(zero, x) for name, x in rows.items()}


def empty_rows(like: Rows, num_batches: int) -> Rows:
    """Room for the rows of so many batches, in at least float32, in which no row stands yet.

    Args:
      like: of one batch; shapes, dtypes and varying axes are all that is looked at.
      num_batches: 0 or more.
    """

    def empty(own: RowGradient) -> RowGradient:
        room = num_batches * own.rows.shape[0]
        values = jnp.zeros((room, *own.values.shape[1:]), at_least_float32(own.values.dtype))
        padding = jnp.full(room, own.num_rows, own.rows.dtype)
        return match_varying(RowGradient(padding, values, own.num_rows), own)

    return {name: empty(own) for name, own in like.items()}


def added_rows(before: Rows, rows: Rows, weight: jax.Array | None, place: jax.Array | None) -> Rows:
    """The entries of `before`, and those of another batch in the room for them or behind all.

    Args:
      before: of the batches so far.
      rows: of the other batch; in at least float32 times its weight, and padding for weight 0.
      weight: () its weight; None: 1.
      place: the number of its room, () int32; None: there is none.
    """

    def weighted(own: RowGradient) -> RowGradient:
        wide = at_least_float32(own.values.dtype)
        values = cast(own.values, wide)
        if weight is None:
            return replace(own, values=values)
        numbers = jnp.where(weight > 0, own.rows, jnp.full_like(own.rows, own.num_rows))
        return replace(own, rows=numbers, values=values * cast(weight, wide))

    def added(room: RowGradient, own: RowGradient) -> RowGradient:
        if place is None:
            return room + own
        start = place * own.rows.shape[0]
        return jax.tree.map(
            lambda x, more: lax.dynamic_update_slice_in_dim(x, more, start, 0), room, own
        )

    return {name: added(before[name], weighted(own)) for name, own in rows.items()}


def summed(rows: Rows, divisor: Callable[[Any], jax.Array]) -> Rows:
    """Each row once, with the sum of its values over `divisor` of their dtype.

    Communication: none.
    """

    def one(own: RowGradient) -> RowGradient:
        once = coalesce(own).gradient
        return replace(once, values=once.values / divisor(once.values.dtype))

    return {name: one(own) for name, own in rows.items()}
