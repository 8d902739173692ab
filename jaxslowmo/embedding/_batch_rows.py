"""The data that a step passes between a batch and the tables: requests and row gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..gradients.sparse import RowGradient, Rows, coalesce
from ..transform import unseen_zero
from ..tree import all_finite, at_least_float32, cast
from ._exchange import Requests


class Ahead(NamedTuple):
    """The table exchanges of the next batch that run during a step; static.

    Attributes:
      vectors: whether rows are looked up and sent, not only row numbers.
      patches: whether rows that the step changes are sent again.
      room: fraction of the slots between two devices that can be sent again, 0 to 1.
    """

    vectors: bool = False
    patches: bool = False
    room: float = 0.25


class Carry(NamedTuple):
    """The request for the rows of a batch that an earlier step made; leaves (devices, ...).

    Attributes:
      requests: the rows that each device uses, and those that others request from it.
      vectors: the requested rows as they were then; None if the batch's own step looks them up.
    """

    requests: Requests
    vectors: PyTree | None


class Requested(NamedTuple):
    """A device's part of a batch and the rows that it requested; without tables only the batch.

    Attributes:
      batch: the batch as the step received it.
      requests: the rows that this device uses, and those that others request from it.
      vectors: requested rows by stored array.
      counts: `Embeddings.metrics` of the requests, summed over the devices of the replica; zeros on
        a replica of weight 0, whose batch may hold anything. Empty without tables.
      refused: () int32, number of wrong ids in `counts`; above 0 the update must be skipped. None
        without tables.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree
    counts: dict[str, jax.Array]
    refused: jax.Array | None


class WithVectors(NamedTuple):
    """A batch with the vectors that were looked up for it, as the loss function receives it.

    Attributes:
      batch: the batch as the step received it.
      embedded: rows or pooled rows by feature, of shape (examples, ...).
    """

    batch: PyTree
    embedded: Any


def rows_are_finite(rows: Rows, axes: tuple[str, ...]) -> jax.Array:
    """Return whether all values are finite, on all devices along `axes`.

    Communication: one all-reduce of 4 bytes over `axes`.
    """
    is_finite = all_finite(
        [jnp.where((g.rows < g.num_rows)[:, None], g.values, 0) for g in rows.values()]
    )
    return lax.pmin(is_finite.astype(jnp.int32), axes) > 0 if axes else is_finite


def ordered_after(rows: dict[str, jax.Array], read: PyTree) -> dict[str, jax.Array]:
    """Return row numbers by stored array that depend on all of `read`.

    An update of these rows then runs after the reads. Without this dependency XLA may order them
    the other way, and copies the whole table so that the reads see the old values. (An optimization
    barrier is not enough: with jax 0.10 it is removed before XLA decides on copies.)

    Communication: none.
    """
    zero = jnp.zeros([], jnp.int32)
    for x in jax.tree.leaves(read):
        zero = zero + unseen_zero(x)
    return {name: x + zero for name, x in rows.items()}


def empty_rows(like: Rows, num_batches: int) -> Rows:
    """Return empty gradients with room for the rows of several batches, in at least float32.

    Args:
      like: row gradients of one batch; only shapes and dtypes are used.
      num_batches: number of batches, 0 or more.
    """

    def empty(g: RowGradient) -> RowGradient:
        room = num_batches * g.rows.shape[0]
        values = jnp.zeros((room, *g.values.shape[1:]), at_least_float32(g.values.dtype))
        padding = jnp.full(room, g.num_rows, g.rows.dtype)
        return RowGradient(padding, values, g.num_rows)

    return {name: empty(gradient) for name, gradient in like.items()}


def added_rows(before: Rows, rows: Rows, weight: jax.Array | None, place: jax.Array | None) -> Rows:
    """Return the row gradients `before` with those of another batch added.

    Args:
      before: row gradients of the batches so far.
      rows: row gradients of the other batch. They are multiplied by its weight in at least
        float32; with weight 0 they become padding.
      weight: () weight of the other batch; None: 1.
      place: () int32, index of the room in `before` (see `empty_rows`) that they fill; None
        appends them.
    """

    def weighted(g: RowGradient) -> RowGradient:
        wide = at_least_float32(g.values.dtype)
        values = cast(g.values, wide)
        if weight is None:
            return replace(g, values=values)
        numbers = jnp.where(weight > 0, g.rows, jnp.full_like(g.rows, g.num_rows))
        return replace(g, rows=numbers, values=values * cast(weight, wide))

    def added(room: RowGradient, gradient: RowGradient) -> RowGradient:
        if place is None:
            return room + gradient
        start = place * gradient.rows.shape[0]
        return jax.tree.map(
            lambda x, more: lax.dynamic_update_slice_in_dim(x, more, start, 0), room, gradient
        )

    return {name: added(before[name], weighted(gradient)) for name, gradient in rows.items()}


def summed(rows: Rows, divisor: Callable[[Any], jax.Array]) -> Rows:
    """Return each row once, with the sum of its values divided by `divisor(dtype)`.

    Communication: none.
    """

    def one(gradient: RowGradient) -> RowGradient:
        once = coalesce(gradient).gradient
        return replace(once, values=once.values / divisor(once.values.dtype))

    return {name: one(gradient) for name, gradient in rows.items()}
