"""Vectors of rows: sent to the devices that request them, updated if rows change, and pooled."""

import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..mesh import axis_names
from ..transform import run_if
from ..tree import at_least_float32, leaf_names
from ._requests import OUTSIDE, PADDING, Requests, in_blocks, in_slots, num_devices, swap_blocks
from ._stores import TableLayout
from ._table import OWNER

Stored = dict[str, jax.Array]
Counts = dict[str, jax.Array]


def read_rows(tables: Mapping[str, jax.Array], requested: Mapping[str, jax.Array]) -> Stored:
    """Return the rows of this device that other devices request; 0 in unused slots.

    Args:
      tables: this device's part of the stored arrays.
      requested: maps a stored array to the local numbers of the rows.

    Communication: none.
    """
    return {
        name: tables[name].at[rows].get(mode="fill", fill_value=0)
        for name, rows in requested.items()
    }


def send_rows(layout: TableLayout, rows: Mapping[str, jax.Array]) -> Stored:
    """Exchange rows that were read, and return those that this device requested, (slots, dim).

    Communication: one all-to-all of devices * capacity rows for all tables of one dtype.
    """
    arrived = swap_blocks(list(rows.values()), layout.axis_name)
    return {
        name: in_slots(layout.stores[name], block)
        for name, block in zip(rows, arrived, strict=True)
    }


def patched_rows(
    layout: TableLayout,
    tables: Mapping[str, jax.Array],
    requests: Requests,
    vectors: Stored,
    changed: Mapping[str, jax.Array],
    *,
    room: float,
    everything: bool | jax.Array = False,
) -> tuple[Stored, Counts]:
    """Update vectors that were looked up in older tables, with the axis bound.

    A lookup can then run during the previous step, and its vectors equal those of a lookup after
    that step bit for bit: rows that have changed since are sent again.

    Args:
      layout: placement of the tables on devices.
      tables: this device's part of the current stored tables.
      requests: result of `Embeddings.exchange_ids`.
      vectors: result of `Embeddings.lookup` in the older tables.
      changed: maps a stored array to the sorted local numbers of the rows of this device that have
        changed; numbers outside of its part are padding.
      room: fraction of each owner's slots that can be sent again, above 0 and up to 1.
      everything: whether all rows may have changed; equal on the devices that share the tables.

    Returns:
      The vectors; and for each stored array () int32, the number of rows that this device has sent,
      also to itself, to be summed over devices. These are the changed rows; or all requested ones
      with `everything`, or if there was no room for the changed rows.

    Communication: one all-reduce of 4 bytes; then, in a `lax.cond`, two all-to-alls, of numbers and
      rows, `room` times the slots each; or one of all slots, with `everything` or if some device
      has no room.
    """
    hits = {name: _is_among(rows, changed.get(name)) for name, rows in requests.asked.items()}
    rooms = {n: max(1, math.ceil(room * rows.shape[1])) for n, rows in requests.asked.items()}
    too_many = jnp.array(False)
    for name, hit in hits.items():
        too_many |= jnp.any(jnp.sum(hit, axis=1, dtype=jnp.int32) > rooms[name])

    def send_all(vectors: Stored) -> tuple[Stored, Counts]:
        del vectors
        every = {n: jnp.ones_like(hit) for n, hit in hits.items()}
        new = send_rows(layout, read_rows(tables, requests.asked))
        return new, _counts(layout, requests, every)

    def send_changed(vectors: Stored) -> tuple[Stored, Counts]:
        places = {name: _first_hits(hit, rooms[name]) for name, hit in hits.items()}
        # Rows without a place are not read: `_at` gives padding there.
        numbers = {
            name: _at(rows, places[name], layout.stores[name].local_rows)
            for name, rows in requests.asked.items()
        }
        received = swap_blocks(list(places.values()), layout.axis_name)
        rows = swap_blocks(list(read_rows(tables, numbers).values()), layout.axis_name)
        new = {
            name: _with_rows(layout, name, vectors[name], place, block)
            for name, place, block in zip(places, received, rows, strict=True)
        }
        return new, _counts(layout, requests, hits)

    if everything is True:
        return send_all(vectors)
    flag = too_many.astype(jnp.int32)
    if num_devices(layout.axis_name) > 1:
        flag = lax.pmax(flag, layout.axis_name)
    fall_back = flag > 0
    if everything is not False:
        fall_back |= everything
    axes = axis_names(layout.axis_name or ())
    return run_if(fall_back, send_all, send_changed, vectors, axes=axes)


def _is_among(requested: jax.Array, changed: jax.Array | None) -> jax.Array:
    """Return a mask of requested rows that are in the sorted `changed`; padding may match, too."""
    if changed is None or changed.size == 0:
        return jnp.zeros(requested.shape, bool)
    place = jnp.minimum(jnp.searchsorted(changed, requested), changed.size - 1)
    return changed[place] == requested


def _first_hits(hit: jax.Array, room: int) -> jax.Array:
    """Return the indices of the first hits in each row, (devices, room) int32; its size pads."""
    size = hit.shape[1]
    numbers = jnp.where(hit, jnp.arange(size, dtype=jnp.int32), jnp.int32(size))
    return jnp.sort(numbers, axis=1)[:, :room]


def _with_rows(
    layout: TableLayout, name: str, vectors: jax.Array, places: jax.Array, rows: jax.Array
) -> jax.Array:
    """Return `vectors` with the rows that each device has sent, at the places that it has sent."""
    store = layout.stores[name]
    blocks = in_blocks(store, vectors)
    device = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return in_slots(store, blocks.at[device, places].set(rows, mode="drop"))


def _at(rows: jax.Array, places: jax.Array, padding: int) -> jax.Array:
    """Return the entries of each row of `rows` at its places; padding for places past the end."""
    return jnp.take_along_axis(rows, places, axis=1, mode="fill", fill_value=padding)


def _counts(layout: TableLayout, requests: Requests, hits: Mapping[str, jax.Array]) -> Counts:
    """Return for each stored array how many requested rows are hits that this device sends."""
    counts = {}
    for name, hit in hits.items():
        is_sent = hit & (requests.asked[name] < layout.stores[name].local_rows)
        if layout.is_split(name) and layout.axis_name is not None:
            # All devices receive all requests, and each sends some columns: count one requester.
            is_sent = lax.dynamic_index_in_dim(is_sent, lax.axis_index(layout.axis_name))
        counts[name] = jnp.sum(is_sent, dtype=jnp.int32)
    return counts


def pool(
    vectors: jax.Array,
    slots: jax.Array,
    pooling: Literal["sum", "mean"] | None,
    weights: jax.Array | None = None,
    position_weights: jax.Array | None = None,
) -> jax.Array:
    """Return the vectors of one feature, pooled in at least float32.

    Args:
      vectors: (n, dim) vectors of the stored array.
      slots: (batch,) or (batch, max_length) int32, as `Requests.slots`. Padding and dropped ids
        count as zeros, ids out of range as NaN.
      pooling: how vectors are combined, as `Table.pooling`.
      weights: factors of the vectors, of the shape of `slots`; None: 1.
      position_weights: (max_length,) factors of the places of a bag; None: 1.

    Returns:
      (batch, dim), or `(*slots.shape, dim)` without pooling, in the dtype of `vectors`.

    Communication: none.
    """
    wide = vectors.astype(at_least_float32(vectors.dtype))
    padding = (slots == PADDING)[..., None]
    # `at` would count slots below 0 from the end.
    rows = jnp.where(slots < 0, jnp.int32(vectors.shape[0]), slots)
    gathered = wide.at[rows].get(mode="fill", fill_value=0)
    gathered = jnp.where((slots == OUTSIDE)[..., None], jnp.nan, gathered)
    if weights is not None:
        # The weight of padding may be NaN or infinite, and 0 times it must be 0.
        gathered = gathered * jnp.where(padding, 0, weights.astype(wide.dtype)[..., None])
    if position_weights is not None:
        factors = position_weights.astype(wide.dtype)[:, None]
        gathered = gathered * (factors if slots.ndim == 1 else factors[None])
    if pooling is None or slots.ndim == 1:
        return gathered.astype(vectors.dtype)
    total = jnp.sum(gathered, axis=1)
    if pooling == "mean":
        count = jnp.sum(~padding, axis=1, dtype=wide.dtype)
        total = total / jnp.maximum(count, 1)
    return total.astype(vectors.dtype)


def position_weights_in(params: PyTree, leaf: str, feature: str, slots: jax.Array) -> jax.Array:
    """Return the leaf of the dense parameters that holds the position weights of a feature.

    Raises:
      ValueError: no leaf has this name, or it has another shape.
    """
    named = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    if leaf not in named:
        available = ", ".join(map(repr, named)) or "none (give `params`)"
        raise ValueError(
            f"{OWNER}: the position weights of feature {feature!r} are leaf {leaf!r} of the dense "
            f"parameters, which are {available}."
        )
    shape = (slots.shape[1] if slots.ndim == 2 else 1,)
    if named[leaf].shape != shape:
        raise ValueError(
            f"{OWNER}: the position weights {leaf!r} of feature {feature!r} must have the shape "
            f"{shape}, one for each place of a bag, got {named[leaf].shape}."
        )
    return named[leaf]
